"""The program that replays every method: its lowered limits, what it keeps of an earlier run, and what a row counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import replay
from unit.bench.made_tables import lines_of, write
from unit.operations.made_trials import STACK, fits, make_trial
from unit.operations.made_trials import make_job as any_job
from unit.search.conftest import MACHINE
from unit.search.made_truth import Truth, cpu_lattice, make_job

from autofit.bench.recorded import Recorded
from autofit.bench.tables import problems_of, read
from autofit.catalog.models import load
from autofit.core.outcome import Outcome
from autofit.core.units import GIB

LIMIT = 3 * GIB // 2


def lora(file: Path, *outcomes: Outcome) -> Recorded:
    """A table of one method; the outcomes' memory limit is the device's."""
    job = any_job()
    made = [make_trial({"rank": 8 * n, "method": "lora"}, o, job=job) for n, o in enumerate(outcomes, start=1)]
    (recorded,) = problems_of(read([write(file, lines_of(made))]))
    return recorded


@pytest.mark.parametrize(("share", "methods"), [(0.25, {"lora", "qlora"}), (0.5, {"lora", "qlora", "any"})])
def test_a_limit_under_which_a_share_runs_out(share: float, methods: set[str], tmp_path: Path) -> None:
    """For the problems of which fewer do under the table's own."""
    truth = Truth(job := make_job(MACHINE, STACK, model=load("smollm2-135m")), cpu_lattice(job), seed=0)
    lines = lines_of(truth.trial(config, LIMIT) for config in truth.lattice.configs)
    own = problems_of(read([write(tmp_path / "t.jsonl", lines)]))
    limits = {r.problem.method: replay.limit_for(r, share) for r in own}
    assert {method for method, limit in limits.items() if limit} == methods
    for recorded in own:
        if (limit := limits[recorded.problem.method]) is None:
            assert recorded.out_of_memory >= share * len(recorded.trials)
            continue
        count, sizes = len(recorded.trials), sorted(truth.memory(c) for c in recorded.problem.configs)
        largest_in = max(size for size in sizes if size <= limit)
        smallest_out = min(size for size in sizes if size > limit)
        assert recorded.under(limit).out_of_memory == sum(size > limit for size in sizes) >= share * count
        assert sum(size > smallest_out for size in sizes) < share * count, "one config fewer would be too few"
        assert limit == (largest_in + smallest_out) // 2


def test_no_limit_leaves_a_share_of_what_is_all_alike(tmp_path: Path) -> None:
    alike = [fits(1.0, 100.0)] * 4
    assert replay.limit_for(lora(tmp_path / "a.jsonl", *alike), 0.25) is None
    assert replay.limit_for(lora(tmp_path / "b.jsonl", *alike, fits(1.2, 1.0)), 0.2) == int(1.1 * GIB)


def figures(trials: float | None, seconds: float | None, **ended: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"trials": [trials, None], "seconds": [seconds, None], "out_of_memory": [0, 0]}
    made["frontier"] = [0.99, 0.8]
    if ended:
        made["ended"] = {"seeds": 20, "out_of_memory": [1, 2], "recommended": [0.01, None], **ended}
    return made


def problem(name: str, limit: int | None = None, **methods: Any) -> dict[str, Any]:
    named = {method.replace("_", "-"): found for method, found in methods.items()}
    return {"name": name, "limit": limit, "best": "full", "methods": named}


def document(*problems: dict[str, Any], made: str = "now", **changed: Any) -> dict[str, Any]:
    names = {name for p in problems for name in p["methods"]}
    methods = {name: {"recorded_at": made, "revision": made} for name in sorted(names)}
    run = {"seeds": 20, "tables": {"t": "digest"}}
    return {**run, "methods": methods, "problems": list(problems), **changed}


def test_a_run_keeps_the_methods_that_it_leaves_out() -> None:
    before = document(problem("t/full", autofit=figures(9, 90.0), other=figures(3, 30.0)), made="before")
    now = document(problem("t/full", autofit=figures(2, 20.0)), problem("t/full", GIB, autofit=figures(3, 30.0)))
    merged = replay.merged(before, now)
    assert merged["problems"][0]["methods"] == {"autofit": figures(2, 20.0), "other": figures(3, 30.0)}
    assert set(merged["problems"][1]["methods"]) == {"autofit"}
    assert {name: made["revision"] for name, made in merged["methods"].items()} == {"autofit": "now", "other": "before"}
    changed = {**before, "tables": {"t": "another"}}
    assert "other" not in replay.merged(changed, now)["problems"][0]["methods"]


def test_rows_of_problems_and_of_methods() -> None:
    rows = replay.tables_of(
        document(
            problem("t/full", autofit=figures(8, 20.0, bound_held=19), falling=figures(1, 10.0)),
            problem("t/any", autofit=figures(9, 40.0, bound_held=20), falling=figures(None, None)),
            problem("t/any", GIB, autofit=figures(None, None), falling=figures(2, 30.0)),
        )
    ).splitlines()
    full, whole, lowered, every = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows[2:6])
    assert full[:4] == ["t/full", "8 / never", "20 / never", "10 (falling)"]
    assert full[4:] == ["1 / 2", "1.0% / never", "19 of 20", "80.0%", ""]
    assert whole[3] == "10 (falling, full alone)"
    assert lowered[0] == "t/any under 1.00 GiB" and lowered[5:7] == ["", ""]
    assert every[1] == "at most 8 on 1 of 3" and every[6] == "39 of 40"
    assert rows[-1].startswith("| `falling` | 2 of 3 | 10 | 20 | 0.50 | now | now |")
