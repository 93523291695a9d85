"""`autofit bench replay` of search methods."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.bench.made_tables import lines_of, write
from unit.cli.conftest import Autofit
from unit.operations.made_trials import STACK
from unit.search.conftest import MACHINE
from unit.search.made_truth import Truth, cpu_lattice, make_job

from autofit.bench import tables
from autofit.bench.oracle import CannotRun, Oracle
from autofit.bench.problem import Problem
from autofit.bench.replay import METHODS
from autofit.catalog.models import load
from autofit.core.units import GIB

REPLAY = ("bench", "replay", "--table", "made.jsonl", "--keep", "kept", "--jobs", "1")


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table in the folder where commands run, of which nothing is estimated."""
    monkeypatch.setattr(tables, "predict_all", lambda *arguments, **options: {})
    truth = Truth(job := make_job(MACHINE, STACK, model=load("smollm2-135m")), cpu_lattice(job), seed=0)
    return write(tmp_path / "made.jsonl", lines_of(truth.trial(c, 3 * GIB // 2) for c in truth.lattice.configs))


@pytest.mark.usefixtures("table")
def test_a_table_of_methods_for_each_problem(autofit: Autofit) -> None:
    done = autofit(*REPLAY, "--methods", "autofit, checklist", "--seeds", "2")
    assert done.code == 0
    assert done.out.startswith("2 seeds; ")
    heading, title, row, checklist, end, recommended, _ = done.out.split("\n\n")[1].splitlines()
    assert heading.startswith("made/full: ") and "fit 1.50 GiB" in heading and "hypervolume up to 1.50 GiB" in heading
    assert title.split() == [
        *("method", "trials", "seconds"),
        *("out", "of", "memory", "hv", "5", "hv", "10", "hv", "20", "hv", "40"),
    ]
    assert row.split()[0] == "autofit" and row.count("/") == 3 and row.count("%") == 4
    assert checklist.split()[0] == "checklist" and "never" in checklist
    assert end.startswith("autofit stopped by itself for 2 of the seeds, after ") and "% slower than the best" in end
    assert recommended.startswith("autofit recommended what is ")
    assert "% slower than the best, and stated at most " in recommended
    assert recommended.endswith("% slower, which held for 2 of the seeds")
    assert all(len(line) <= 160 for line in done.out.splitlines())
    assert ": made/qlora: checklist, seed 2: " in done.err
    assert "\nmade/any: 192 configs, " in done.out and "; best of full " in done.out


@pytest.mark.usefixtures("table")
def test_json_is_one_document_and_says_what_did_not_run(autofit: Autofit, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(problem: Problem, oracle: Oracle, seed: int) -> None:
        raise CannotRun("it needs what is not here")

    monkeypatch.setitem(METHODS, "falling-accelerate", lacking)  # type: ignore[arg-type]
    arguments = ("--methods", "checklist,falling-accelerate", "--seeds", "1", "--memory-limit", "1GiB")
    document = autofit(*REPLAY, *arguments, "--json").document
    assert document["seeds"] == 1 and {p["memory_limit_bytes"] for p in document["problems"]} == {GIB}
    checklist, falling = document["problems"][0]["methods"]
    assert checklist["not_run"] is None and checklist["score"]["seeds"] == 1
    assert falling == {"name": "falling-accelerate", "not_run": "it needs what is not here", "score": None}
    assert "falling-accelerate not run: it needs what is not here" in autofit(*REPLAY, *arguments).out


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (("--methods", ""), 2, "unknown search method ''"),
        (("--seeds", "0"), 2, "seeds is 0"),
        (("--memory-limit", "4"), 2, "did you mean 4GiB"),
        (("--memory-limit", "1MiB"), 3, "nothing of made fits 1 MiB"),
    ],
)
def test_what_a_replay_refuses(autofit: Autofit, arguments: tuple[str, ...], code: int, part: str) -> None:
    done = autofit(*REPLAY, *arguments)
    assert (done.code, done.out) == (code, "")
    assert part in done.err and len(done.err.splitlines()) == 1
