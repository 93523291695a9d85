"""How fast the server answers from a large store, while trials are written. Run nothing else on the machine meanwhile.

    python benchmarks/service.py [--contexts 200] [--trials 5000] [--rate 200] [--seconds 30] [--postgresql]

Each context has so many made-up trials. Requests come at fixed times, whether or not earlier ones were answered: a slow
answer delays none of them. Half ask for a recommendation, half for a frontier, of a context drawn anew. One trial is
stored every second meanwhile. `first` are what nobody has asked since the server started, one after the other;
`uncached` are asked plainly, and `known` with the tag of an earlier answer, after that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
from sqlalchemy import text
from timings import made_trials, small_job

from autofit.core.workload import Workload
from autofit.store import Store
from autofit.store.rows import keep
from autofit.store.tables import TrialRow
from autofit.trial.machine.detection import detect

CONNECTIONS = 32


def fill(store: Store, contexts: int, trials: int) -> list[Workload]:
    """Contexts of one model and card with sequences of different lengths; all but the first are copies of its rows."""
    first = replace(small_job().workload, seq_len=2)
    store.add_new(replace(trial, workload=first) for trial in made_trials(trials))
    workloads = [replace(first, seq_len=2 + number) for number in range(contexts)]
    names = [c.name for c in TrialRow.__table__.columns if c.name not in ("id", "uid", "workload_key")]
    columns = ", ".join(names)
    for workload in workloads[1:]:
        with store._database.write() as connection:
            keep(connection, workload=workload)
            keys = {"own": workload.key, "first": first.key}
            copied = f"SELECT {columns}, :own FROM trials WHERE workload_key = :first"
            connection.execute(text(f"INSERT INTO trials ({columns}, workload_key) {copied}"), keys)
            newest = "(SELECT max(id) FROM trials)"
            copied = f"SELECT hardware_key, stack_key, :own, 1, {newest} FROM contexts WHERE workload_key = :first"
            connection.execute(text(f"INSERT INTO contexts {copied}"), keys)
    if not store._database.address.is_sqlite:
        with store._database.write() as connection:
            connection.execute(text("ANALYZE"))
    return workloads


@contextmanager
def database(postgresql: bool) -> Iterator[str]:
    """The address of an empty one, which is deleted at the end."""
    if not postgresql:
        with tempfile.TemporaryDirectory() as folder:
            yield str(Path(folder) / "store.db")
        return
    from pgserver.postgres_server import get_server

    server = get_server(tempfile.mkdtemp(prefix="autofit-service-"), cleanup_mode="delete")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


@contextmanager
def serving(store: str) -> Iterator[tuple[int, psutil.Process, float]]:
    """The port of a server, its process, and how many seconds after its start it has answered."""
    command = [sys.executable, "-m", "autofit", "serve", "--no-runner", "--port", "0", "--store", store]
    begin = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = re.search(r":(\d+), ", process.stderr.readline())
        assert said, "it does not serve"
        try:
            urlopen(f"http://localhost:{said[1]}/healthz").close()
            yield int(said[1]), psutil.Process(process.pid), time.perf_counter() - begin
        finally:
            process.terminate()


async def ask(line: Any, path: str, tag: str | None) -> tuple[int, str | None]:
    """Status and tag of the answer on a connection that is kept."""
    reader, writer = line
    known = f"If-None-Match: {tag}\r\n" if tag else ""
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{known}\r\n".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    size = re.search(r"content-length: (\d+)", head)
    await reader.readexactly(int(size[1]) if size else 0)
    found = re.search(r'etag: ("[^"]+")', head)
    return int(head.split()[1]), found[1] if found else None


async def load(port: int, paths: list[str], rate: float, seconds: float, known: bool) -> dict[str, Any]:
    """Milliseconds from when each request was due to when it was answered. At the rate 0, every path is asked once, one
    after the other."""
    lines: asyncio.Queue[Any] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        lines.put_nowait(await asyncio.open_connection("127.0.0.1", port))
    tags: dict[str, str] = {}
    taken, statuses = [], []

    async def one(path: str, due: float) -> None:
        line = await lines.get()
        status, tag = await ask(line, path, tags.get(path))
        taken.append((time.perf_counter() - due) * 1000)
        statuses.append(status)
        lines.put_nowait(line)
        if known and tag:
            tags[path] = tag

    if known or not rate:
        for path in paths:
            await one(path, time.perf_counter())
    if known:
        taken.clear()
        statuses.clear()
    draw, begin = random.Random(0), time.perf_counter()
    tasks = []
    for number in range(int(rate * seconds)):
        due = begin + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(draw.choice(paths), due)))
    await asyncio.gather(*tasks)
    ordered = sorted(taken)
    of_status = {str(status): statuses.count(status) for status in sorted(set(statuses))}
    shares = {f"p{share}_ms": round(ordered[int(len(ordered) * share / 100)], 2) for share in (50, 90, 99)}
    return {"requests": len(ordered), "statuses": of_status, **shares, "largest_ms": round(ordered[-1], 2)}


@contextmanager
def writing(store: Store, workload: Workload) -> Iterator[list[float]]:
    """Store a trial every second, and note its milliseconds."""
    over, taken = threading.Event(), []

    def write() -> None:
        for trial in made_trials(10**6):
            begin = time.perf_counter()
            store.add(replace(trial, workload=workload))
            taken.append((time.perf_counter() - begin) * 1000)
            if over.wait(1.0):
                return

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield taken
    finally:
        over.set()
        thread.join()


def main() -> None:
    """Fill a store, serve it, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("contexts", 200), ("trials", 5000), ("rate", 200), ("seconds", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--postgresql", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with database(asked.postgresql) as url, Store.open(url) as store:
        workloads = fill(store, asked.contexts, asked.trials)
        query = "model={0.model}&seq_len={0.seq_len}&global_batch={0.global_batch}"
        paths = [f"/v1/{kind}?{query.format(w)}" for w in workloads for kind in ("recommendation", "frontier")]
        with serving(url) as (port, process, start), writing(store, workloads[0]) as stored:
            memory = [process.memory_info().rss]
            found: dict[str, Any] = {}
            for name, rate, known in (
                ("first", 0, False),
                ("uncached", asked.rate, False),
                ("known", asked.rate, True),
            ):
                found[name] = asyncio.run(load(port, paths, rate, asked.seconds, known))
                memory.append(process.memory_info().rss)
    found |= {
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": detect("cpu")[0].name,
        "database": "postgresql" if asked.postgresql else "sqlite",
        "trials": asked.contexts * asked.trials,
        "contexts": asked.contexts,
        "rate": asked.rate,
        "start_seconds": round(start, 2),
        "store_ms_median": sorted(stored)[len(stored) // 2],
        "server_mib": [size >> 20 for size in memory],
    }
    print(json.dumps(found, indent=1))
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
