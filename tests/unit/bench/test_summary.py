"""What many searches on made devices come to, and that no search runs twice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from autofit.bench import cases
from autofit.bench.cases import Case, run_lacking
from autofit.bench.made_search import OURS
from autofit.bench.summary import ENOUGH, by_device, least_bounds_held, summary
from autofit.operations.replay_problems import RECORDED, Tables

TPE, RANDOM = "optuna-tpe", "optuna-random"
TABLES = Tables(files=(RECORDED / "cpu-2c-smollm2-135m.jsonl",))
DONE = {"regret": 0.0, "bound_holds": True, "seconds_to_near": 10.0, "trials_to_best": 2, "seconds_to_best": 12.0} | {
    "trials": 5,
    "seconds": 60.0,
    "frontier": 0.9,
    "longest_seconds": 20.0,
    "computing_seconds": 0.1,
}


def row(device: str, seed: int, search: str = OURS, **figures: Any) -> dict[str, Any]:
    return {"problem": "table/full", "device": device, "seed": seed, "search": search, **DONE, **figures}


def test_a_summary_is_of_our_search_and_a_failed_one_counts_as_the_worst() -> None:
    found = summary(
        "all",
        [
            row("a", 0, regret=0.04, longest_seconds=61.0),
            row("a", 1, bound_holds=False, seconds_to_near=None),
            row("a", 2, bound_holds=None),
            {"problem": "table/full", "device": "a", "seed": 3, "search": OURS, "error": "ValueError: a defect"},
            row("a", 0, TPE, seconds_to_near=40.0),
            row("a", 1, TPE, seconds_to_near=None),
            row("a", 0, RANDOM, seconds_to_near=100.0),
        ],
    )
    assert (found.searches, found.failed, found.bounds, found.bounds_held) == (4, 1, 2, 1)
    assert (found.regret.median, found.worst) == (pytest.approx(0.02), "table/full/a/3")
    assert (found.greedy, found.longest_seconds, found.trials) == (1, 61.0, 5)
    assert found.over == {TPE: 0.25, RANDOM: 0.1}, "where neither came within 5 %, nothing is compared"
    assert list(found.seconds_to_near_of) == [RANDOM, TPE]


def test_devices_are_in_order_of_what_is_missed_and_judged_by_enough_searches() -> None:
    rows = [row("good", seed) for seed in range(ENOUGH)]
    rows += [row("bad", seed, regret=0.2, bound_holds=seed > 1) for seed in range(ENOUGH)]
    rows += [row("seldom", 0, regret=0.1, bound_holds=False)]
    found = by_device(rows)
    assert [one.name for one in found] == ["bad", "seldom", "good"]
    assert least_bounds_held(found) == pytest.approx(1 - 2 / ENOUGH)
    assert least_bounds_held(found[1:2]) is None


def test_a_search_that_was_kept_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Case] = []

    def run(tables: Tables, budget: float, case: Case) -> dict[str, Any]:
        ran.append(case)
        return dict(DONE, regret=float(case.seed))

    def each(task: Any, lacking: list[Case], jobs: int) -> Any:
        return ((case, task(case)) for case in lacking)

    monkeypatch.setattr(cases, "_run", run)
    monkeypatch.setattr(cases, "each", each)
    keep, told = tmp_path / "rows.jsonl", []
    wanted = [Case(problem="table/full", device="memory:1.4", seed=seed) for seed in (0, 1)]

    def rows(budget: float = 600.0) -> list[float]:
        done = run_lacking(TABLES, wanted, budget=budget, jobs=1, keep=keep, report=told.append)
        return [found["regret"] for found in done]

    assert rows() == [0.0, 1.0] and rows() == [0.0, 1.0] and ran == wanted
    keep.write_text(keep.read_text().splitlines()[0] + '\n{"problem": "cut o')
    assert rows() == [0.0, 1.0] and ran == [*wanted, wanted[1]]
    assert all(math.isfinite(json.loads(line)["seconds"]) for line in keep.read_text().splitlines()[2:])
    assert rows(budget=0.0) and len(ran) == 5, "under another budget it is another search"
