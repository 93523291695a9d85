"""Many workers of a replay: each runs one trial at a time, while time passes that the loop and the store take."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import many_workers
from unit.bench.made_tables import recorded
from unit.search.conftest import job, lattice, truth
from unit.search.made_truth import Truth

from autofit.bench.oracle import Oracle
from autofit.bench.ours import ReplayPool, job_of, search_on
from autofit.store import Store

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


def test_a_search_on_many_workers_keeps_every_trial_in_the_store(truth: Truth, tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "store.db")) as store:
        found = many_workers.searched(recorded(truth), WORKERS, store)
        assert store.count() == found["trials"] > WORKERS
        assert store.searches()[0].spent_trials == found["trials"]
    assert 0.0 <= found["idle_with_work"] < 1.0 and 0.0 <= found["idle"] < 1.0
    assert found["transactions_per_trial"] >= 1.0
    assert found["workers_at_most"] >= 1 and found["driver_seconds_per_trial"] > 0.0
    assert many_workers.table_of({"searches": [found]}).count("\n") == 2
