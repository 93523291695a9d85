"""How busy one driver keeps many workers, and what it asks of the store: the real loop and store, recorded trials.

    python benchmarks/many_workers.py [--table FILE] [--workers 1,4,16,64] [--store URL] [--out FILE]

One thorough search of the whole table for each number of workers, each on a device of its own. Trials take their
recorded seconds, on a clock that passes without waiting for them. What the loop and the store take between them is real
and passes on the same clock, while the workers go on: so a worker is idle for as long as its next trial is not begun.
The store is a PostgreSQL server of this program's own (pgserver), unless `--store` names another, which it fills.

Until the last config was begun there was work for every worker: `idle_with_work` is the share of idle time until then,
and `idle` that of the whole search, which ends with fewer trials than workers and the second run of the winner.
Statements are those of the thread that drives; its lease takes one more a second, however many workers it has. A driver
that takes so long for each trial keeps `workers_at_most` busy with trials of the median length. Ray is not in this.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy is loaded: the time of other threads is not counted

from replay import TABLES, code_here
from sqlalchemy import event

from autofit.bench.oracle import Oracle
from autofit.bench.ours import ReplayPool, job_of, search_on
from autofit.bench.recorded import Recorded
from autofit.bench.tables import predictions_of, problems_of, read
from autofit.core.device.hardware import Hardware
from autofit.core.outcome import Trial
from autofit.store import Heartbeat, Store, new_owner
from autofit.store.trial_log import StoredTrials


class Endless(Oracle):
    """Answers a search to its own end: nobody judges it before."""

    def _count(self) -> None:
        self._asks += 1

    @property
    def configs(self) -> list[Any]:
        """What has run, in the order in which it began."""
        return [trial.config for trial in self._runs]


class Watch:
    """Seconds that the thread which drives has taken since this was last called; 0 the first time, before which nobody
    waited. By the processor's time, so that other work on the machine counts little; the store's by the wall's."""

    def __init__(self) -> None:
        self._since: float | None = None
        self.in_all = self.in_store = self._waited = 0.0

    def __call__(self) -> float:
        now = time.thread_time() + self._waited
        passed, self._since = now - (self._since or now), now
        self.in_all += passed
        return passed

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Meanwhile the thread waits for the store."""
        wall, own = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            took = time.perf_counter() - wall
            self.in_store += took
            self._waited += took - (time.thread_time() - own)


class Counted(StoredTrials):
    """The log of a search, which counts what the driver's thread asks of the store, and the seconds that takes."""

    statements = transactions = 0

    def count_on(self, store: Store, watch: Watch) -> None:
        """Count from now on."""
        own, self.watch = threading.get_ident(), watch

        def statement(*_: Any) -> None:
            self.statements += threading.get_ident() == own

        def transaction(*_: Any) -> None:
            self.transactions += threading.get_ident() == own

        event.listen(store._database.engine, "after_cursor_execute", statement)
        event.listen(store._database.engine, "commit", transaction)

    def keep(self, trial: Trial) -> Trial:
        """Timed."""
        with self.watch.storing():
            return super().keep(trial)

    def between_executions(self, hardware: Hardware) -> float:
        """Timed."""
        with self.watch.storing():
            return super().between_executions(hardware)


def searched(recorded: Recorded, workers: int, store: Store) -> dict[str, Any]:
    """The figures of one search with so many workers."""
    job, oracle = job_of(recorded.problem), Endless(recorded, 0)
    watch = Watch()
    pool = ReplayPool(job=job, oracle=oracle, size=workers, pass_time=watch)
    search_id = uuid4().hex
    asked = {"digest": search_id, "hardware": job.hardware, "stack": job.stack, "workload": job.workload}
    lease = store.queue.begin(search_id, new_owner(), **asked, request={})
    with Heartbeat(store.queue, lease) as held:
        log = Counted(store, search_id, fresh=True, heartbeat=held)  # of other searches' trials it knows none
        found = search_on(pool, recorded.problem, 0, log=log, thorough=True)
        log.count_on(store, watch)
        found.run()
    store.queue.end(lease, "succeeded", None)
    assert store.count(search_id=search_id) == len(pool.ran)
    first = next((n for n, c in enumerate(oracle.configs) if c in oracle.configs[:n]), len(pool.ran))
    last_begun, ended = max(begun for begun, _ in pool.ran[:first]), max(ends for _, ends in pool.ran)
    trials = len(pool.ran)
    seconds = [ends - begun for begun, ends in pool.ran]
    return {
        "workers": workers,
        "configs": len(recorded.problem.configs),
        "trials": trials,
        "idle_with_work": rounded(idle(pool, workers, last_begun)),
        "seconds_with_work": rounded(last_begun),
        "idle": rounded(idle(pool, workers, ended)),
        "seconds": rounded(ended),
        "trial_seconds": rounded(median(seconds)),
        "statements_per_trial": rounded(log.statements / trials),
        "transactions_per_trial": rounded(log.transactions / trials),
        "store_seconds_per_trial": rounded(watch.in_store / trials),
        "driver_seconds_per_trial": rounded(watch.in_all / trials),
        "workers_at_most": int(median(seconds) * trials / watch.in_all),
    }


def idle(pool: ReplayPool, workers: int, until: float) -> float:
    """The share of the workers' time until then in which they ran nothing; 0 of no time."""
    busy = sum(min(ends, until) - min(begun, until) for begun, ends in pool.ran)
    return 1.0 - busy / (workers * until) if until else 0.0


def rounded(figure: float) -> float:
    return float(f"{figure:.3g}")


@contextmanager
def server() -> Iterator[str]:
    """The URL of a PostgreSQL server that ends with it."""
    with tempfile.TemporaryDirectory(prefix="autofit-postgresql-", ignore_cleanup_errors=True) as folder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a runtime folder that containers do not have
            from pgserver.postgres_server import get_server

            found = get_server(folder)
        try:
            yield found.get_uri()
        finally:
            found.cleanup()


def replayed(asked: argparse.Namespace, url: str) -> dict[str, Any]:
    """The document of all that is asked for."""
    (table,) = read([asked.table])
    recorded = max(problems_of([table]), key=lambda one: len(one.problem.configs))
    recorded = replace(recorded, problem=replace(recorded.problem, predictions=predictions_of(table)))
    made = {"recorded_at": datetime.now(UTC).isoformat(timespec="seconds"), **code_here(), "table": table.name}
    with Store.open(url) as store:
        return {**made, "searches": [searched(recorded, workers, store) for workers in asked.workers]}


COLUMNS = {
    "workers": lambda one: f"{one['workers']:,}",
    "trials": lambda one: f"{one['trials']} of {one['configs']} configs",
    "idle with work": lambda one: f"{one['idle_with_work']:.1%}",
    "idle in all": lambda one: f"{one['idle']:.0%}",
    "driver, s a trial": lambda one: f"{one['driver_seconds_per_trial']:.2g}",
    "of it store": lambda one: f"{one['store_seconds_per_trial']:.2g}",
    "statements a trial": lambda one: f"{one['statements_per_trial']:.0f}",
    "workers at most": lambda one: f"{one['workers_at_most']:,}",
}


def table_of(document: Mapping[str, Any]) -> str:
    """The figures as a table in Markdown."""
    rows = [COLUMNS, ["---"] * len(COLUMNS)]
    rows += [[said(one) for said in COLUMNS.values()] for one in document["searches"]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Replay, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=TABLES[0])
    parser.add_argument("--workers", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 16, 64])
    parser.add_argument("--store")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.store:
        document = replayed(asked, asked.store)
    else:
        with server() as url:
            document = replayed(asked, url)
    if asked.out:
        asked.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table_of(document))


if __name__ == "__main__":
    main()
