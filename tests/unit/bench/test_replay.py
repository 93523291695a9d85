"""Replays of tables in files: what is judged, and which tables are refused, by row."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from unit.bench.made_tables import lines_of, write
from unit.operations.made_trials import STACK, crashed, fits
from unit.search.conftest import MACHINE
from unit.search.made_truth import Truth, cpu_lattice, make_job

from autofit.bench import tables as reading
from autofit.bench.recorded import Recorded
from autofit.bench.replay import replay
from autofit.bench.tables import problems_of, read
from autofit.catalog.models import load
from autofit.core.errors import AutofitError, NothingFits, UsageError
from autofit.core.outcome import Fits, OutOfMemory
from autofit.core.units import GIB
from autofit.operations.recording.table_file import is_table, read_table

LIMIT = 3 * GIB // 2
Lines = list[dict[str, Any]]
CHEAP = ("autofit", "optuna-random", "falling-accelerate", "checklist")


@pytest.fixture(scope="module")
def truth() -> Truth:
    """A world of a part of the space `cpu`."""
    job = make_job(MACHINE, STACK, model=load("smollm2-135m"))
    whole = cpu_lattice(job)
    part = tuple(c for c in whole.configs if c["precision"] != "fp32" and c["loss"] == "full")
    return Truth(job, replace(whole, configs=part), seed=0)


@pytest.fixture(scope="module")
def lines(truth: Truth) -> Lines:
    """A table of all its configs under 1.5 GiB."""
    return lines_of(truth.trial(config, LIMIT) for config in truth.lattice.configs)


@pytest.fixture
def table(lines: Lines, tmp_path: Path) -> Path:
    """The same in a file."""
    return write(tmp_path / "cpu-of-tests.jsonl", lines)


@pytest.fixture
def no_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimating takes longer than everything else."""
    monkeypatch.setattr(reading, "predict_all", lambda *asked, **options: {})


@pytest.mark.usefixtures("no_estimates")
def test_every_training_method_is_a_problem(table: Path, truth: Truth) -> None:
    lines: list[str] = []
    result = replay([table], methods=CHEAP, seeds=2, report=lines.append)
    assert [judged.recorded.problem.name for judged in result.problems] == [
        f"cpu-of-tests/{method}" for method in ("full", "lora", "qlora", "any")
    ]
    assert any(": cpu-of-tests/lora: optuna-random, seed 2: " in line for line in lines)
    for judged in result.problems:
        problem = judged.recorded.problem
        configs = (c for c in truth.lattice.configs if problem.method in (c["method"], "any"))
        assert set(problem.configs) == set(configs) and len(problem.methods) == (3 if problem.method == "any" else 1)
        best = truth.outcome(judged.recorded.best.config, LIMIT)
        assert isinstance(best, Fits) and best.measurement == judged.recorded.best.measurement
        assert list(judged.scores) == list(CHEAP)
        for score in judged.scores.values():
            assert not isinstance(score, str) and score.seeds == 2
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert document["seeds"] == 2 and document["left_out"] == []
    full = document["problems"][0]
    assert full["configs"] == full["fitting"] + full["out_of_memory"] and full["memory_limit_bytes"] == LIMIT
    assert full["reference_point"] == {"device_bytes": LIMIT, "tokens_per_second": 0.0}
    ours = full["methods"][0]
    assert (ours["name"], ours["not_run"]) == ("autofit", None)
    assert set(ours["score"]) == {"seeds", "near", "trials", "seconds", "out_of_memory", "hypervolume", "ended"}


@pytest.mark.usefixtures("no_estimates")
def test_two_at_a_time_are_the_same(table: Path) -> None:
    alone, together = (replay([table], methods=CHEAP[:2], seeds=1, jobs=jobs).to_json() for jobs in (1, 2))
    assert alone == together


@pytest.mark.usefixtures("no_estimates")
def test_an_interrupted_replay_goes_on_and_runs_no_search_twice(table: Path, tmp_path: Path) -> None:
    whole = replay([table], methods=CHEAP[1:], seeds=2).to_json()
    lines: list[str] = []

    def interrupted(line: str) -> None:
        lines.append(line)
        if len(lines) == 11:
            raise KeyboardInterrupt

    def replayed(report: Callable[[str], None]) -> dict[str, Any]:
        return replay([table], methods=CHEAP[1:], seeds=2, keep=tmp_path / "kept", report=report).to_json()

    with pytest.raises(KeyboardInterrupt):
        replayed(interrupted)
    assert replayed(lines.append) == whole
    ran = [line.split(": ", 1)[1].rsplit(": ", 1)[0] for line in lines]
    assert len(set(ran)) == len(ran) == 4 * len(CHEAP[1:]) * 2
    # Every method has its first seed before any has its second.
    assert ["seed 1" in search for search in ran] == [True] * 12 + [False] * 12
    assert replayed(lambda line: pytest.fail(f"run twice: {line}")) == whole
    # More seeds are added to those that are kept.
    replay([table], methods=["checklist"], seeds=3, keep=tmp_path / "kept", report=lines.append)
    for line, method in zip(lines[-4:], ("full", "lora", "qlora", "any"), strict=True):
        assert f"of 4: cpu-of-tests/{method}: checklist, seed 3: " in line


def _under(limit: int, recorded: Recorded) -> int:
    return limit


def test_the_best_of_a_whole_table_is_that_of_the_most_faithful_method_that_fits(table: Path, truth: Truth) -> None:
    fitting = [c for c in truth.lattice.configs if truth.memory(c) <= LIMIT]
    assert min(fitting, key=truth.seconds)["method"] != "full"
    full = next(c for c in truth.lattice.configs if c["method"] == "full")
    least = min(truth.memory(c) for c in truth.lattice.configs if c["method"] == "full")
    for limit, method in ((LIMIT, "full"), (least - 1, "lora")):
        (whole,) = (r for r in problems_of(read([table]), partial(_under, limit)) if r.problem.method == "any")
        assert whole.best.method == method and whole.best == whole.best_of(method)
        assert all(
            whole.problem.merit(full, 1.0) > whole.problem.merit(c, 9.0) for c in fitting if c["method"] != "full"
        )


@pytest.mark.usefixtures("no_estimates")
def test_a_limit_below_the_tables(table: Path, truth: Truth) -> None:
    limit = GIB
    result = replay([table], methods=["checklist"], seeds=1, limit_of=lambda recorded: limit)
    for judged in result.problems:
        trials = judged.recorded.trials
        assert {c for c, t in trials.items() if isinstance(t.outcome, Fits)} == {
            c for c in trials if truth.memory(c) <= limit
        }
        assert judged.recorded.problem.memory_limit_bytes == limit
        assert all(t.memory_limit_bytes == limit for t in trials.values())
        turned = [t for c, t in trials.items() if limit < truth.memory(c) <= LIMIT]
        assert turned and all(isinstance(t.outcome, OutOfMemory) and t.seconds == 7.5 for t in turned)


@pytest.mark.usefixtures("no_estimates")
def test_methods_of_which_nothing_fits_are_named(table: Path, truth: Truth) -> None:
    least = {m: min(truth.memory(c) for c in truth.lattice.configs if c["method"] == m) for m in ("full", "qlora")}
    result = replay([table], methods=["checklist"], seeds=1, limit_of=lambda recorded: least["full"] - 1)
    assert "cpu-of-tests/full" in result.left_out
    with pytest.raises(NothingFits, match=r"nothing of cpu-of-tests fits .*higher --memory-limit"):
        replay([table], limit_of=lambda recorded: least["qlora"] - 1)


def test_what_is_wrong_with_the_request(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"methods": ["optuna-tep"]}, "unknown search method 'optuna-tep': did you mean optuna-tpe"),
        ({"seeds": 0}, "seeds is 0"),
        ({"jobs": 0}, "jobs is 0"),
        ({"limit_of": lambda recorded: 2 * GIB}, "above the 1.50 GiB under which"),
        ({"tables": [tmp_path / "cpu-of-test.jsonl"]}, r"did you mean .*cpu-of-tests\.jsonl"),
        ({"tables": [table, table]}, "two tables are named cpu-of-tests"),
    ]
    for arguments, said in wrong:
        with pytest.raises(UsageError, match=said):
            replay(**{"tables": [table], **arguments})
    monkeypatch.setattr(reading, "RECORDED", tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"no recorded table in .*elsewhere.*--table FILE"):
        replay()


@pytest.mark.usefixtures("no_estimates")
def test_the_tables_of_a_checkout_are_the_default(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "export.jsonl").write_text('{"schema": 1, "autofit": "0.1.0"}\n')
    (tmp_path / "notes.jsonl").write_text("none\n")
    monkeypatch.setattr(reading, "RECORDED", tmp_path)
    result = replay(methods=["checklist"], seeds=1)
    assert {judged.recorded.problem.table for judged in result.problems} == {"cpu-of-tests"}


def test_every_recorded_table_of_this_checkout_is_whole() -> None:
    tables = [path for path in reading.RECORDED.glob("*.jsonl") if is_table(path)]
    assert tables
    for path in tables:
        assert read_table(path, whole=True).trials


def test_a_whole_table_is_read_as_it_was_written(table: Path, truth: Truth) -> None:
    result = read_table(table, whole=True)
    assert (result.name, result.memory_limit_bytes, result.workload) == ("cpu-of-tests", LIMIT, truth.job.workload)
    assert [t.config for t in result.trials] == list(truth.lattice.configs)
    assert [t.outcome for t in result.trials] == [truth.outcome(t.config, LIMIT) for t in result.trials]


def changed(number: int, change: Callable[[dict[str, Any]], object]) -> Callable[[Lines], Lines]:
    """The table with one line changed in place."""

    def make(lines: Lines) -> Lines:
        copy: Lines = json.loads(json.dumps(lines))
        fitting = [i for i, line in enumerate(copy) if i > 0 and line["outcome"] == "fits"]
        change(copy[0] if number == 0 else copy[fitting[number - 1]])
        return copy

    return make


def in_measurement(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda line: line["measurement"].update(values)


def in_steps(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda line: line["measurement"]["step_seconds"].update(values)


BAD: dict[str, tuple[Callable[[Lines], Lines], str]] = {
    "other schema": (changed(0, lambda h: h.update(schema=2)), r"row 1: schema 2, and this version reads 1"),
    "export": (lambda lines: [{"schema": 1, "autofit": "0.1.0"}], r"row 1: .*hardware, stack, workload"),
    "other hardware": (changed(0, lambda h: h["hardware"].update(colour="red")), r"row 1: .*colour"),
    "limit of nothing": (changed(0, lambda h: h.update(memory_limit_bytes=0)), r"row 1: memory_limit_bytes is 0"),
    "limit beyond the device": (
        changed(0, lambda h: h.update(memory_limit_bytes=2**60)),
        r"row 1: memory_limit_bytes is 1152921504606846976, and must be above 0 and at most the device's",
    ),
    "no device": (
        changed(0, lambda h: h["hardware"].update(memory_bytes="much")),
        r"row 1: .*hardware.memory_bytes: input should be a valid integer",
    ),
    "half a trial": (
        changed(1, in_measurement(stopped_early=True)),
        r"row \d+: stopped_early is true, and every trial",
    ),
    "no trial": (lambda lines: lines[:1], r"is empty: it has a header and no trial"),
    "two recordings": (lambda lines: [*lines[:5], *lines], r"row 6: the header of another recording"),
    "a config twice": (lambda lines: [*lines, lines[3]], r"row \d+: repeats the config of row 4"),
    "no config": (changed(1, lambda line: line.pop("config")), r"row \d+: config is missing"),
    "no measurement": (changed(1, lambda line: line.pop("measurement")), r"row \d+: measurement: field required"),
    "no seconds": (changed(1, lambda line: line.pop("seconds")), r"row \d+: seconds is missing"),
    "no such axis": (changed(1, lambda line: line["config"].update(colour="red")), r"row \d+: unknown axis 'colour'"),
    "no such value": (
        changed(1, lambda line: line["config"].update(precision="bf15")),
        r"row \d+: unknown value of precision 'bf15': did you mean bf16",
    ),
    "an axis too few": (changed(1, lambda line: line["config"].pop("loss")), r"row \d+: its config does not name"),
    "no such outcome": (
        changed(1, lambda line: line.update(outcome="fitted")),
        r"row \d+: unknown outcome 'fitted': did you mean fits",
    ),
    "no time": (changed(1, lambda line: line.update(seconds=0)), r"row \d+: seconds is 0.0, and must be above 0"),
    "time in words": (
        changed(1, lambda line: line.update(seconds="9 s")),
        r"row \d+: seconds: input should be a valid number",
    ),
    "negative speed": (changed(1, in_measurement(tokens_per_second=-3.0)), r"row \d+: tokens_per_second is -3.0"),
    "beyond the limit": (
        changed(1, in_measurement(device_bytes=LIMIT + 1)),
        r"row \d+: device_bytes is 1610612737: what fits has at least 0 and at most the limit",
    ),
    "negative step": (changed(1, in_steps(median=-1.0)), r"row \d+: step_seconds.median is -1.0"),
    "endless time": (
        changed(1, lambda line: line.update(seconds=10**400)),
        r"row \d+: seconds is inf, and must be above 0 and finite",
    ),
    "two speeds": (
        changed(1, in_measurement(tokens_per_second=1e9)),
        r"row \d+: tokens_per_second is 1000000000.0, and its step_seconds.median makes it",
    ),
    "a batch that is not divided": (
        changed(1, lambda line: line["config"].update(micro_batch=3)),
        r"row \d+: micro_batch=3 does not divide the 4 sequences",
    ),
    "unknown figure": (changed(1, in_measurement(watts=300)), r"row \d+: .*watts"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_table_that_is_wrong_is_refused_by_row(kind: str, lines: Lines, tmp_path: Path) -> None:
    make, said = BAD[kind]
    file = write(tmp_path / "bad.jsonl", make(lines))
    with pytest.raises(UsageError, match=rf"bad\.jsonl.*{said}") as raised:
        replay([file])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: text[:-20], r"row \d+: cut off: the same `autofit bench record` resumes"),
        (lambda text: "", "is empty"),
        (lambda text: "\n\n", "is empty"),
        (lambda text: text.replace("\n", "\n{\n", 1), "row 2: not JSON"),
        (lambda text: text.replace("\n", "\n[1]\n", 1), "row 2: not a JSON object"),
        (
            lambda text: text.replace('"tokens_per_second": ', '"tokens_per_second": NaN, "x": ', 1),
            "NaN is not JSON",
        ),
    ],
)
def test_a_file_that_is_no_table(spoil: Callable[[str], str], said: str, table: Path) -> None:
    table.write_text(spoil(table.read_text()))
    with pytest.raises(UsageError, match=said):
        replay([table])


def test_what_the_machinery_failed_is_no_row(lines: Lines, tmp_path: Path) -> None:
    failed = {"config": lines[1]["config"], **replace(crashed(), transient=True).to_json(), "seconds": 1.0}
    with pytest.raises(UsageError, match="row 2: a failure of the machinery"):
        replay([write(tmp_path / "t.jsonl", [lines[0], failed])])
    # A config's own crash is a row like any other.
    row = {**failed, **crashed().to_json()}
    other = {"config": lines[2]["config"], **fits(1.0, 10).to_json(), "seconds": 5.0}
    assert len(read_table(write(tmp_path / "u.jsonl", [lines[0], row, other]), whole=True).trials) == 2


def test_a_folder_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(AutofitError, match="cannot be read"):
        replay([tmp_path])
