"""The service as a team runs it, on PostgreSQL: two servers, two runners, real trials of a tiny model. Whoever dies,
the search goes on, and who follows it misses nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from leases import expire
from postgresql import Database
from sqlalchemy import text
from started import processes
from test_search_command import Stage, folder, stage, strays, wait_until_gone

from autofit.store import Store

__all__ = ["folder"]
DRIVER = "autofit.operations.service.driver"
TRIALS = 4
ASKED = {
    "model": "small",
    "seq_len": 32,
    "global_batch": 4,
    "space": "smoke",
    "memory_limit": "2GiB",
    "max_trials": TRIALS,
    "time_budget": "1h",
    "predict": False,
    "thorough": True,
}


@pytest.fixture
def database() -> Iterator[Database]:
    server = Database()
    yield server
    server.end()


@pytest.fixture
def store(database: Database, folder: Path) -> Iterator[Store]:
    """The store that all share; this machine's device is known to it."""
    from autofit.trial.machine.detection import detect

    with Store.open(database.url) as opened:
        opened.queue.announce(detect()[0])
        yield opened


class Service:
    """What runs: servers and runners, each a process."""

    def __init__(self, folder: Path, store: str, token: str) -> None:
        self._folder, self._store, self._token = folder, store, token
        self._open: list[Any] = []

    def close(self) -> None:
        """Close what it has read from."""
        for one in self._open:
            one.close()

    def runner(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command("runner", "--in-place"))

    def server(self) -> tuple[subprocess.Popen[str], str]:
        """A server that answers, and its address."""
        arguments = ("serve", "--no-runner", "--port", "0", "--models", str(self._folder))
        process = subprocess.Popen(self._command(*arguments), stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        self._open.append(process.stderr)
        match = re.match(r"autofit: serving on (http://[\d.]+:\d+), ", process.stderr.readline())
        assert match
        while True:
            with suppress(urllib.error.URLError):
                self.ask(f"{match[1]}/healthz")
                return process, match[1]
            time.sleep(0.05)

    def ask(self, address: str, method: str = "GET", body: Any = None, **headers: str) -> Any:
        """What a request answers."""
        with self.opened(address, method, body, **headers) as answer:
            return json.load(answer)

    def opened(self, address: str, method: str = "GET", body: Any = None, **headers: str) -> Any:
        data = None if body is None else json.dumps(body).encode()
        own_headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = urllib.request.urlopen(
            urllib.request.Request(address, data, own_headers | more, method=method), timeout=600
        )
        self._open.append(answer)
        return answer

    def _command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "autofit", *words, "--store", self._store]


@pytest.fixture
def service(folder: Path, store: Store) -> Iterator[Service]:
    """Starts servers and runners; whatever still runs at the end is killed."""
    running = Service(folder, store.url, store.access.create("ann", "run"))
    yield running
    running.close()
    for process in processes(folder):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


def drivers(folder: Path) -> list[int]:
    return [process for process, line in processes(folder).items() if DRIVER in line]


def is_measuring(folder: Path, store: Store, trials: int) -> bool:
    """Whether a trial is under way after so many that are stored."""
    return store.count() >= trials and stage(folder) == Stage.TRIAL


def epoch(store: Store, search_id: str) -> int:
    search = store.search(search_id)
    assert search is not None
    return search.lease_epoch


def epochs_of_trials(store: Store) -> list[int]:
    """The epoch of each trial's driver, oldest first; no two trials are the same write."""
    with store._database.read() as connection:
        rows = connection.execute(text("SELECT uid, search_epoch FROM trials ORDER BY id")).all()
    assert len({uid for uid, _ in rows}) == len(rows) and all(uid for uid, _ in rows)
    return [number for _, number in rows]


def followed(stream: Any, until: Callable[[str], bool] = lambda kind: False) -> list[tuple[int, str]]:
    """Numbers and kinds of a stream's events, up to one that `until` names, or to its end or its server's."""
    events: list[tuple[int, str]] = []
    number = 0
    with suppress(OSError, urllib.error.URLError):
        for line in stream:
            name, _, value = line.decode().strip().partition(": ")
            if name == "id":
                number = int(value)
            elif name == "event":
                kind = value
            elif not name and number and (not events or events[-1][0] != number):
                events.append((number, kind))
                if until(kind):
                    break
    return events


def test_whoever_dies_the_search_goes_on_and_a_cancel_leaves_nothing(
    folder: Path, store: Store, service: Service, database: Database
) -> None:
    (one, at_one), (two, at_two) = service.server(), service.server()
    ids = {service.ask(f"{at}/v1/searches", "POST", ASKED)["search_id"] for at in (at_one, at_two)}
    (search_id,) = ids
    first = service.runner()
    stream = service.opened(f"{at_one}/v1/searches/{search_id}/events")
    seen = followed(stream, until=lambda kind: kind == "trial")

    # The driver is paused in the middle of a trial, past its lease, and another runner takes over.
    wait_until(partial(is_measuring, folder, store, 1))
    (paused,) = drivers(folder)
    os.kill(paused, signal.SIGSTOP)
    expire(store)
    second = service.runner()
    wait_until(lambda: epoch(store, search_id) == 2)
    os.kill(paused, signal.SIGCONT)
    wait_until(lambda: paused not in processes(folder))
    assert first.poll() is None

    # The server that is followed is killed, the database restarts, and so does whoever follows.
    one.kill()
    one.wait()
    seen += followed(stream)
    database.restart()
    stream = service.opened(f"{at_two}/v1/searches/{search_id}/events", Last_Event_ID=str(seen[-1][0]))

    # That runner is killed in the middle of a trial: its driver goes with it, and the first runner takes over.
    wait_until(partial(is_measuring, folder, store, store.count() + 1))
    second.kill()
    second.wait()
    seen += followed(stream)
    assert [number for number, _ in seen] == list(range(1, len(seen) + 1)), "an event was lost or came twice"
    assert [kind for _, kind in seen if kind not in ("planned", "trial")] == [
        "queued",
        "running",
        "running",
        "running",
        "succeeded",
    ]
    assert service.ask(f"{at_two}/v1/searches/{search_id}")["state"] == "succeeded"
    epochs = epochs_of_trials(store)
    assert all(earlier <= later for earlier, later in pairwise(epochs)), "an overtaken driver wrote"
    assert set(epochs) == {1, 2, 3}
    search = store.search(search_id)
    assert search is not None and search.spent_trials == store.count() == TRIALS
    query = "model=small&seq_len=32&global_batch=4&memory_limit=2GiB"
    points = service.ask(f"{at_two}/v1/frontier?{query}")["points"]
    assert {point["trial_id"] for point in points} <= {trial.trial_id for trial in store.trials()}
    assert points

    # A search that is cancelled in the middle of a trial leaves the server and the runner alone, and nothing else.
    other = service.ask(f"{at_two}/v1/searches", "POST", {**ASKED, "seed": 1})["search_id"]
    wait_until(partial(is_measuring, folder, store, TRIALS))
    assert service.ask(f"{at_two}/v1/searches/{other}", "DELETE")["state"] == "cancelled"
    wait_until(lambda: set(processes(folder)) == {first.pid, two.pid} or first.poll() is not None)

    # A runner that is told to end gives its search back, and a server ends.
    third = service.ask(f"{at_two}/v1/searches", "POST", {**ASKED, "seed": 2})["search_id"]
    wait_until(lambda: bool(drivers(folder)))
    first.terminate()
    assert first.wait() == 0
    assert service.ask(f"{at_two}/v1/searches/{third}")["state"] == "queued"
    two.terminate()
    assert two.wait() == 0
    wait_until_gone(folder)
    assert strays(folder) == []
