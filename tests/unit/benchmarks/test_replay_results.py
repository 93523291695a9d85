"""The page of a replay's results: its verdicts and words from made-up scores, its plots, and that it goes on."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from unit.operations.made_trials import STACK
from unit.search.conftest import MACHINE
from unit.search.made_tables import lines_of, write
from unit.search.made_truth import Truth, cpu_lattice, make_job

from autofit.catalog.models import load
from autofit.errors import UsageError
from autofit.operations import replay_foresight
from autofit.search.replay import methods
from autofit.search.replay.method import CannotRun
from autofit.units import GIB

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
LIMIT = 3 * GIB // 2
SHA = 16 * "4d"
MADE = "| {} | smollm2-135m, 128 tokens x 4 sequences | `cpu` | 1.50 GiB | 60 | 40 | 20 | 2026-03-01 | `4d4d4d4d4d4d` |"
"""The row of a table that was made for these tests."""
Spread = tuple[float | None, float | None]


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield importlib.import_module("replay_results")


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def spread(both: Spread) -> dict[str, float | None]:
    return {"median": both[0], "p90": both[1]}


def score(
    trials: Spread = (3, 9),
    seconds: Spread = (30.0, 90.0),
    *,
    out_of_memory: float = 0,
    share: float = 0.995,
    ended: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A method's, as `autofit bench replay --json` has it."""
    band = {of: [0.5] * 39 + [1.0] for of in ("median", "p10", "p90")}
    entry = {"seeds": 20, "trials": spread(trials), "seconds": spread(seconds)}
    return {
        "seeds": 20,
        "reached": [{"within": within, **entry} for within in (0.05, 0.02, 0.01)],
        "out_of_memory": spread((out_of_memory, out_of_memory)),
        "hypervolume": [{"trials": n, **spread((share, 0.9))} for n in (5, 10, 20, 40)],
        "ended": ended,
        "trajectory": {
            "speed": band,
            "hypervolume": band,
            "seconds": [float(n) for n in range(1, 41)],
            "speed_by_seconds": band,
        },
    }


def end(*, out_of_memory: float = 1, held: int | None = 19, recommended: float | None = 0.009) -> dict[str, Any]:
    return {
        "seeds": 20,
        "trials": spread((12, 15)),
        "seconds": spread((120.0, 150.0)),
        "out_of_memory": spread((out_of_memory, out_of_memory)),
        "regret": spread((0.0, 0.004)),
        "recommended": None if held is None else spread((0.003, recommended)),
        "stated": None if held is None else spread((0.01, 0.02)),
        "within_stated": held,
    }


def problem(name: str = "made/lora", limit: int = LIMIT, **scores: dict[str, Any] | str) -> dict[str, Any]:
    """One of a document, with these methods; `_` stands for `-` in their names, text for why one has not run."""
    table, method = name.split("/")
    entries = [
        {
            "name": method_name.replace("_", "-"),
            "not_run": found if isinstance(found, str) else None,
            "score": None if isinstance(found, str) else found,
        }
        for method_name, found in scores.items()
    ]
    return {
        "name": name,
        "table": table,
        "method": method,
        "hardware": MACHINE.to_json(),
        "stack": STACK.to_json(),
        "workload": {"model": "smollm2-135m", "seq_len": 128, "global_batch": 4},
        "memory_limit_bytes": limit,
        "table_limit_bytes": LIMIT,
        "configs": 60,
        "fitting": 40,
        "out_of_memory": 20,
        "frontier": 5,
        "best": {
            "config": {"method": "full" if method == "any" else method, "precision": "bf16"},
            "tokens_per_second": 512.0,
        },
        "lowered_to": None,
        "methods": entries,
    }


def document(*problems: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": 1,
        "command": "python benchmarks/replay_results.py",
        "seeds": 20,
        "libraries": {"optuna": "5.0.0", "python": "3.11.7", "xgboost": None},
        "code": {"revision": "0123456789ab", "estimator": 7},
        "tables": {
            "made": {
                "space": "cpu",
                "memory_limit_bytes": LIMIT,
                "recorded_at": "2026-03-01T00:00:00+00:00",
                "sha256": SHA,
            }
        },
        "problems": list(problems),
        "left_out": [],
    }


GOOD = score((8, 15), (10.0, 20.0), out_of_memory=1, share=0.99, ended=end())
OTHER = score((9, 20), (30.0, 99.0))


def verdicts(*found: dict[str, Any]) -> list[tuple[bool | None, str]]:
    wanted = module("replay_verdicts").WANTED
    judged = [w.judge(case) for w in wanted for case in w.cases(found)]
    return [(verdict.reached, verdict.measured) for verdict in judged]


@pytest.mark.usefixtures("results")
def test_what_is_just_reached() -> None:
    assert verdicts(problem(autofit=GOOD, optuna_tpe=OTHER, checklist=score((None, None), (None, None)))) == [
        (True, "8 / 15"),
        (True, "`optuna-tpe` needs 3 times as many"),
        (True, "1"),
        (True, "99.0%"),
        (True, "19 of 20 searches"),
    ]


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize(
    ("number", "ours", "measured"),
    [
        (0, score((9, 15), (10.0, 20.0), ended=end()), "9 / 15"),
        (0, score((8, 16), (10.0, 20.0), ended=end()), "8 / 16"),
        (0, score((8, None), (10.0, None), ended=end()), "8 / never"),
        (1, score((8, 15), (10.1, 20.0), ended=end()), "`optuna-tpe` needs 2.97 times as many"),
        (2, score((8, 15), (10.0, 20.0), out_of_memory=2, ended=end()), "2"),
        (2, score((8, 15), (10.0, 20.0), ended=end(out_of_memory=1.5)), "1.5"),
        (3, score((8, 15), (10.0, 20.0), share=0.989, ended=end()), "98.9%"),
        (4, score((8, 15), (10.0, 20.0), ended=end(held=18)), "18 of 20 searches"),
    ],
)
def test_what_is_just_not_reached(number: int, ours: dict[str, Any], measured: str) -> None:
    found = verdicts(problem(autofit=ours, optuna_tpe=OTHER))
    assert [reached for reached, _ in found] == [place != number for place in range(5)]
    assert found[number] == (False, measured)


@pytest.mark.usefixtures("results")
def test_figures_that_hang_on_what_was_never_reached() -> None:
    never = score((None, None), (None, None))
    assert verdicts(problem(autofit=never, optuna_tpe=OTHER))[:2] == [(False, "never / never"), (False, "never")]
    assert verdicts(problem(autofit=GOOD, optuna_tpe=never))[1] == (True, "no other method gets there")
    # A variant of ours is none of the others.
    assert verdicts(problem(autofit=GOOD, autofit_warm=OTHER))[1] == (None, "no other method has run")
    for unsaid in (None, end(held=None)):
        silent = score((8, 15), (10.0, 20.0), ended=unsaid)
        assert verdicts(problem(autofit=silent, optuna_tpe=OTHER))[4] == (None, "no search stated a bound")


@pytest.mark.usefixtures("results")
def test_trial_seconds_are_judged_on_whole_tables() -> None:
    never, quick, slow = score((None, None), (None, None)), score((1, 1), (5.0, 5.0)), score((9, 9), (40.0, 40.0))
    full = problem("made/full", autofit=quick, optuna_tpe=never, optuna_gp=OTHER)
    lora = problem("made/lora", autofit=GOOD, optuna_tpe=quick)
    lowered = problem("made/lora", GIB, autofit=GOOD, optuna_tpe=quick)
    whole = problem("made/any", autofit=GOOD, optuna_tpe=slow)
    other = problem("other/lora", autofit=GOOD, optuna_tpe=quick)
    (wanted,) = (w for w in module("replay_verdicts").WANTED if "trial-seconds" in w.text)
    found = [(case["name"], wanted.judge(case)) for case in wanted.cases([full, lora, lowered, whole, other])]
    assert [(name, verdict.reached, verdict.measured) for name, verdict in found] == [
        # The others may search the best's training method alone, too: what they need for another one does not count.
        ("made/any", True, "`optuna-gp on full alone` needs 3 times as many"),
        # The only method that a table has is the whole of it.
        ("other/lora", False, "`optuna-tpe` needs 0.5 times as many"),
    ]
    assert list(wanted.cases([full, lora])) == []


@pytest.mark.usefixtures("results")
def test_the_frontier_is_judged_where_the_search_goes_on_for_it() -> None:
    stops, goes_on = score((8, 15), (10.0, 20.0), share=0.8, ended=end()), score(share=0.99)
    assert verdicts(problem(autofit=stops, optuna_tpe=OTHER))[3] == (False, "80.0%")
    assert verdicts(problem(autofit=stops, autofit_thorough=goes_on, optuna_tpe=OTHER))[3] == (True, "99.0%")


def test_the_best_of_the_others_by_either_reading(results: ModuleType) -> None:
    """With hindsight another method on each table; and the one that is best over all of them."""

    def took(seconds: float | None) -> dict[str, Any]:
        return score((1, 1), (seconds, seconds))

    found = document(
        problem("made/full", autofit=took(10.0), optuna_gp=took(20.0)),
        problem("made/any", autofit=took(10.0), optuna_gp=took(90.0), optuna_tpe=took(30.0), checklist=took(None)),
        problem("one/lora", autofit=took(10.0), optuna_gp=took(50.0), optuna_tpe=took(45.0), checklist=took(5.0)),
    )
    found["tables"]["one"] = found["tables"]["made"]
    lines = results.page(found).splitlines()
    (title,) = (number for number, line in enumerate(lines) if line.startswith("| whole table |"))
    assert lines[title].endswith("| best with hindsight | times ours | `optuna-gp` everywhere | times ours |")
    assert lines[title + 2 : title + 4] == [
        "| made/any | 10 | 20 (`optuna-gp on full alone`) | 2 | 20 | 2 |",
        "| one/lora | 10 | 5 (`checklist`) | 0.5 | 50 | 5 |",
    ]
    never = document(problem(autofit=took(10.0), checklist=took(None)))
    assert "everywhere` |" not in results.page(never) and "Two readings" not in results.page(never)


def test_each_other_method_as_the_only_one_for_every_problem(results: ModuleType) -> None:
    """Lucky on one problem counts for nothing on the next; where ours never gets there, nothing is compared."""

    def took(seconds: float | None) -> dict[str, Any]:
        return score((1, 1), (seconds, seconds))

    text = results.page(
        document(
            problem("made/full", autofit=took(10.0), optuna_gp=took(25.0), checklist=took(2.0), doubling=took(None)),
            problem("made/lora", autofit=took(20.0), optuna_gp=took(65.0), checklist=took(None)),
            problem("made/qlora", autofit=took(None), optuna_gp=took(30.0)),
        )
    )
    assert "**One method for every problem.** `autofit` comes within 1% of the best on 2 of 3 problems" in text
    lines = text.splitlines()
    (title,) = (number for number, line in enumerate(lines) if "problems on which it gets there" in line)
    assert lines[title + 2 : title + 5] == [
        "| `optuna-gp` | 3 of 3 | 90 | 30 | 3 |",
        "| `checklist` | 1 of 2 | 2 | 10 | 0.2 |",
        "",
    ]


@pytest.mark.usefixtures("results")
def test_a_table_is_held_against_what_was_fitted(truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = module("replay_fitted")
    monkeypatch.setattr(fitted, "FITTED", {"something": ("one",)})
    monkeypatch.setattr(fitted, "FIRST_SEARCH", {"two": "this", "four": "another"})
    trials = [truth.trial(config, LIMIT) for config in truth.lattice.configs[:5]]
    lines = lines_of(trials)
    moved = [{**lines[0], "hardware": {**lines[0]["hardware"], "cores": 1}}, *lines[1:]]
    longer = [{**lines[0], "workload": {**lines[0]["workload"], "seq_len": 64}}, *lines[1:]]
    write(tmp_path / "one.jsonl", lines[:4])
    tables = {name: write(tmp_path / f"{name}.jsonl", some) for name, some in (("two", moved), ("three", longer))}
    every = [tmp_path / "one.jsonl", *tables.values(), write(tmp_path / "four.jsonl", [lines[0], *lines[2:]])]
    found = fitted.fitted_to(every, tmp_path, "this")
    assert found["trials"] == 3 and found["what"] == {"something": ["one"]}
    assert {name: tuple(said.values()) for name, said in found["tables"].items()} == {
        "one": (True, True, 3, False),
        "two": (False, False, 0, True),
        "three": (False, True, 0, False),
        "four": (False, True, 2, False),
    }


def test_plots_are_the_same_again_and_small(results: ModuleType, tmp_path: Path) -> None:
    every = {name.replace("-", "_"): OTHER for name in methods.METHODS}
    found = document(problem(**{**every, "autofit": GOOD}), problem(limit=GIB, autofit=GOOD))
    (tmp_path / "plots").mkdir()
    for name in ("gone-full-speed.svg", "drawn-by-hand.svg"):
        (tmp_path / "plots" / name).touch()
    files = results.write(found, tmp_path / "RESULTS.md")
    before = {file: file.read_bytes() for file in files}
    assert before[tmp_path / "plots" / "made-lora-speed.svg"] == results.svg(found["problems"][0], "speed")
    drawn = {file for file in files if file.suffix == ".svg"}
    assert len(drawn) == 6 and {*drawn, tmp_path / "plots" / "drawn-by-hand.svg"} == set(tmp_path.glob("plots/*.svg"))
    text = files[0].read_text()
    for file in drawn:
        picture = before[file].decode()
        assert len(picture) < 60_000 and f"](plots/{file.name})" in text
        assert "<dc:date>" not in picture and ">autofit</text>" in picture
    of_all = before[tmp_path / "plots" / "made-lora-speed.svg"].decode()
    assert all(f">{name}</text>" in of_all for name in methods.METHODS)
    assert "made/lora under 1.00 GiB" in text and (tmp_path / "plots" / "made-lora-under-1.00-GiB-speed.svg") in drawn


@pytest.fixture(scope="module")
def truth() -> Truth:
    job = make_job(MACHINE, STACK, model=load("smollm2-135m"))
    return Truth(job, cpu_lattice(job), seed=0)


@pytest.fixture
def table(truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recorded table of one training method, of which nothing is estimated."""
    monkeypatch.setattr(replay_foresight, "estimate_all", lambda *asked, **options: {})
    configs = [config for config in truth.lattice.configs if config["method"] == "full"]
    return write(tmp_path / "made.jsonl", lines_of(truth.trial(config, LIMIT) for config in configs))


class Command:
    """The script as it is called, with everything that it reports."""

    def __init__(self, results: ModuleType, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.results, self.folder, self.monkeypatch = results, table.parent, monkeypatch
        self.options = {"--table": str(table), "--methods": "autofit,checklist,optuna-random", "--seeds": "2"}
        self.reported: list[str] = []

    def __call__(self, *, interrupt_after: int | None = None, **changed: str) -> dict[str, Any]:
        """The document that it has written."""
        ran = 0

        def said(line: str) -> None:
            nonlocal ran
            self.reported.append(line)
            ran += " asks, " in line
            if ran == interrupt_after:
                raise KeyboardInterrupt

        self.monkeypatch.setattr(self.results, "_said", said)
        files = {"keep": "kept", "out": "results.json", "page": "RESULTS.md"}
        options = {
            "--jobs": "1",
            **{f"--{option}": str(self.folder / name) for option, name in files.items()},
            **self.options,
            **{f"--{option}": value for option, value in changed.items()},
        }
        self.results.main([word for option in options.items() for word in option])
        written: dict[str, Any] = json.loads((self.folder / "results.json").read_text())
        return written

    @property
    def ran(self) -> list[str]:
        """Problem, method and seed of every search, in order."""
        return [line.split(": ", 1)[1].rsplit(": ", 1)[0] for line in self.reported if " asks, " in line]


@pytest.fixture
def command(results: ModuleType, table: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(results, table, monkeypatch)


def test_an_interrupted_command_goes_on_and_runs_no_search_twice(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(interrupt_after=4)
    assert ended.value.code == 130 and not (command.folder / "RESULTS.md").exists()
    assert "run the same command again to continue" in capsys.readouterr().err
    found = command()
    assert len(command.ran) == len(set(command.ran)) == 3 * 2
    # Every method has its first seed before any has its second.
    assert [" seed 1" in name for name in command.ran] == [True] * 3 + [False] * 3
    assert [p["name"] for p in found["problems"]] == ["made/full"]
    assert found["code"]["search"] == command.results.code_of(command.results.SEARCH)
    assert found["tables"]["made"]["space"] == "cpu" and len(found["tables"]["made"]["sha256"]) == 64
    again = command()
    assert len(command.ran) == 6 and again["problems"] == found["problems"]
    before = (command.folder / "RESULTS.md").read_bytes()
    command.results.main(["--from", str(command.folder / "results.json"), "--page", str(command.folder / "RESULTS.md")])
    assert (command.folder / "RESULTS.md").read_bytes() == before


def test_what_a_method_lacks_is_told_and_tried_again(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*asked: object) -> None:
        raise CannotRun("it needs what is not here")

    with monkeypatch.context() as patch:
        patch.setitem(methods.METHODS, "checklist", lacking)  # type: ignore[arg-type]
        first = command()["problems"][0]["methods"]
    assert [(m["name"], m["not_run"]) for m in first if m["not_run"]] == [("checklist", "it needs what is not here")]
    assert len(command.ran) == 2 * 2
    assert all(m["not_run"] is None for m in command()["problems"][0]["methods"])


def test_on_two_cores_the_same(command: Command) -> None:
    one = command(methods="checklist,optuna-random", keep=str(command.folder / "alone"))
    two = command(methods="checklist,optuna-random", jobs="2")
    assert two["problems"] == one["problems"]
    assert len(command.ran) == 8 and sorted(command.ran[:4]) == sorted(command.ran[4:])


def test_methods_of_another_run_are_taken_where_the_table_is_the_same(results: ModuleType) -> None:
    def made(digest: str, *problems: dict[str, Any]) -> dict[str, Any]:
        plain = document(*problems)
        (said,) = plain["tables"].values()
        tables = {name: {**said, "sha256": digest if name == "other" else "same"} for name in ("made", "other")}
        return {**plain, "recorded_at": "2026-01-01T00:00:00+00:00", "tables": tables}

    own = made(
        "b", problem(autofit=GOOD, checklist=OTHER, optuna_gp="it needs SciPy"), problem("other/lora", autofit=GOOD)
    )
    more = (problem(optuna_gp=OTHER, checklist=GOOD, optuna_tpe=OTHER), problem("other/lora", optuna_gp=OTHER))
    found = results.with_methods_of(own, made("a", *more), "a.json")
    scores = [{m["name"]: m["score"] for m in p["methods"]} for p in found["problems"]]
    assert scores == [
        {"autofit": GOOD, "checklist": OTHER, "optuna-gp": OTHER, "optuna-tpe": OTHER},
        {"autofit": GOOD},
    ]
    (run,) = found["also"]
    assert (run["methods"], run["left_out"]) == (["optuna-gp", "optuna-tpe"], None)
    assert (
        "The figures of `optuna-gp` and `optuna-tpe` are those of an earlier run, `a.json` of 2026-01-01 at revision"
        in results.page(found)
    )


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"seeds": 10}, "other seeds: 10 instead of 20"),
        ({"libraries": {"optuna": "4.0.0", "python": "3.11.9"}}, "other libraries: optuna 4.0.0 instead of 5.0.0"),
    ],
)
def test_an_earlier_run_that_would_not_compare_is_left_out_and_the_page_says_so(
    results: ModuleType, other: dict[str, Any], why: str
) -> None:
    own = document(problem(autofit=GOOD))
    earlier = {**document(problem(optuna_gp=OTHER)), "recorded_at": "2026-01-01T00:00:00+00:00", **other}
    del earlier["code"]
    found = results.with_methods_of(own, earlier, "a.json")
    assert [m["name"] for p in found["problems"] for m in p["methods"]] == ["autofit"]
    (said,) = (
        line for line in results.page(found).splitlines() if "`a.json` of 2026-01-01, at a revision that" in line
    )
    assert f"does not name is left out: made with {why}." in said


def test_tables_of_one_limit_are_replayed_together(results: ModuleType) -> None:
    named = ["a.jsonl", "b.jsonl@1GiB", "a.jsonl@25%", "c.jsonl", "d@e.jsonl@1024MiB", "c.jsonl@25%"]
    groups = results.groups_of(named, None)
    assert [([str(file) for file in g.files], g.memory_limit_bytes, g.out_of_memory) for g in groups] == [
        (["a.jsonl", "c.jsonl"], None, None),
        (["b.jsonl", "d@e.jsonl"], GIB, None),
        (["a.jsonl", "c.jsonl"], None, 0.25),
    ]


def test_a_limit_that_is_not_below_the_tables_own_is_left_out(
    results: ModuleType, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One list of limits serves tables of every card."""
    groups = results.groups_of([f"{table}@{limit}" for limit in ("1GiB", "1536MiB", "79GiB")], None)
    assert [g.memory_limit_bytes for g in groups] == [GIB]
    assert "not replayed under 79GiB, which is not below the 1.50 GiB of its trials" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no table is left to replay"):
        results.groups_of([f"{table}@79GiB"], None)


def test_what_the_command_refuses(results: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text('{"schema": 2}')
    for arguments, said in (
        (["--from", str(tmp_path / "other.json")], "does not hold results of this script with schema 1"),
        (["--from", str(tmp_path / "none.json")], "cannot be read"),
        (["--methods", "optuna-tep"], "did you mean optuna-tpe"),
        (["--seeds", "0"], "seeds is 0: it must be at least 1"),
        (["--jobs", "0"], "jobs is 0: it must be at least 1"),
        (["--table", "a.jsonl@4"], "did you mean 4GiB"),
        (["--table", "a.jsonl@4.5%"], "'4.5%' is no share of configs"),
        (["--table", "a.jsonl@100%"], "'100%' is no share of configs"),
        (["--table", str(tmp_path / "a.jsonl")], "unknown table"),
    ):
        with pytest.raises(SystemExit) as ended:
            results.main(arguments)
        assert ended.value.code == UsageError.exit_code
        err = capsys.readouterr().err
        assert said in err and len(err.splitlines()) == 1
