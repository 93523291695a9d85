"""Writes a store of the newest schema to `assets/`, for the tests of all later schemas.

Run it once for each new revision, when that is released: `python tests/unit/store/make_asset.py`. Existing assets stand
for stores that users have and are never rewritten.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pgserver
from pgserver.postgres_server import get_server

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from conftest import CONFIG, OUTCOMES, PREDICTION, SHARED, WORKLOAD, a_probe, a_trial, measured
from leases import begin

from autofit.store import Store, export_lines
from autofit.store.database.schema import REVISIONS

ASSETS = Path(__file__).with_name("assets")


def fill(store: Store) -> None:
    """Trials of every outcome, repeats, two workloads, predictions, an estimate, a probe, searches of each
    ending, tokens."""
    times = (f"2026-01-01T00:00:{second:02}Z" for second in range(60))
    trial = a_trial()
    states = ("running", "succeeded", "cancelled", "failed")
    leases = {state: begin(store, trial, state, space="one-gpu") for state in states}
    for rank, speed in ((8, 900.0), (16, 1000.5), (16, 1001.5), (32, 700.0)):
        config = CONFIG.replace(rank=rank)
        fits = measured(speed, rank * 2**30)
        store.add(a_trial(config=config, outcome=fits, recorded_at=next(times)), lease=leases["succeeded"])
    for number, outcome in enumerate(OUTCOMES):
        config = CONFIG.replace(micro_batch=2**number)
        store.add(a_trial(config=config, outcome=outcome, recorded_at=next(times)))
    longer = replace(WORKLOAD, seq_len=4096)
    store.add(a_trial(workload=longer, memory_limit_bytes=24 * 2**30, recorded_at=next(times)))
    for outcome in (None, OUTCOMES[0]):
        store.add(a_trial(outcome=outcome, prediction=PREDICTION, recorded_at=next(times)))
    for state in (SHARED, None):
        store.add(a_trial(config=CONFIG.replace(rank=64), device_state=state, recorded_at=next(times)))
    store.estimates.keep({"0" * 64: {"device_bytes": 21 * 2**30}})
    store.probes.keep(a_probe())
    store.access.create("ann", "run")
    store.access.create("bob", "read")
    store.access.revoke("bob")
    store.queue.cancel(leases["cancelled"].search_id, by="ann")
    for state in ("succeeded", "failed"):
        store.queue.end(leases[state], state, {"trials": 1} if state == "succeeded" else None)


def main() -> None:
    """Write the dumps of both kinds of database, and the trials as JSON lines."""
    ASSETS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        with Store.open(str(path)) as store:
            fill(store)
            lines = "".join(export_lines(store))
        with closing(sqlite3.connect(path)) as connection:
            dump = "\n".join(connection.iterdump()) + "\n"
        server = get_server(Path(folder) / "postgresql")
        try:
            with Store.open(server.get_uri()) as store:
                fill(store)
            tool = Path(pgserver.__file__).parent / "pginstall" / "bin" / "pg_dump"
            command = [str(tool), "--inserts", "--no-owner", "--no-privileges", server.get_uri()]
            dumped = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        finally:
            server.cleanup()
    for name, text in (("sqlite.sql", dump), ("postgresql.sql", dumped), ("jsonl", lines)):
        with (ASSETS / f"{REVISIONS[-1]}.{name}").open("x") as file:
            file.write(text)


if __name__ == "__main__":
    main()
