"""Several workers of a replay: each runs one trial at a time, while time passes that the loop takes."""

from __future__ import annotations

from itertools import pairwise

from unit.bench.made_tables import recorded
from unit.search.conftest import job, lattice, truth
from unit.search.made_truth import Truth

from autofit.bench.oracle import Oracle
from autofit.bench.ours import ReplayPool, job_of, search_on

__all__ = ["job", "lattice", "truth"]
WORKERS = 4


def test_no_worker_runs_two_trials_at_once_and_time_passes_between_them(truth: Truth) -> None:
    table = recorded(truth)
    pool = ReplayPool(job=job_of(table.problem), oracle=Oracle(table, 0), size=WORKERS, pass_time=lambda: 0.25)
    search_on(pool, table.problem, 0).run()
    assert len(pool.ran) > WORKERS
    for begun, _ in pool.ran:
        assert sum(other <= begun < ends for other, ends in pool.ran) <= WORKERS
    starts = [begun for begun, _ in pool.ran]
    assert all(later - earlier >= 0.25 for earlier, later in pairwise(starts))
