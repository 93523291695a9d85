"""Queued searches as processes drive them: paused, killed, taken over, cancelled; with real trials of a tiny model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from leases import expire
from sqlalchemy import text
from test_search_command import FEW_CONFIGS, Stage, folder, processes, stage, strays, wait_until_gone

from autofit.operations import SearchRequest, WorkloadOptions
from autofit.operations.service.asked import submit
from autofit.store import Store

__all__ = ["folder"]
DRIVER = "autofit.operations.service.driver"
TRIALS = 4

Start = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    """The store that the runners share."""
    (folder / "space.yaml").write_text(FEW_CONFIGS)
    with Store.open(str(folder / "store.db")) as opened:
        yield opened


@pytest.fixture
def start(folder: Path, store: Store) -> Iterator[Start]:
    """Starts a runner; whatever still runs at the end is killed."""
    command = [sys.executable, "-m", "autofit", "runner", "--in-place", "--store", str(folder / "store.db")]
    yield lambda: subprocess.Popen(command)
    for process in processes(folder):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def queue(folder: Path, store: Store, seed: int = 0) -> str:
    """A search of a few trials, for the device of this machine."""
    from autofit.trial.machine.detection import detect

    workload = WorkloadOptions(model=str(folder / "small"), seq_len=32, global_batch=4, seed=seed)
    request = SearchRequest(
        workload=workload,
        space=str(folder / "space.yaml"),
        hardware=detect()[0].name,
        memory_limit_bytes=2 * 1024**3,
        max_trials=TRIALS,
        time_budget_seconds=3600.0,
        predict=False,
        thorough=True,
    )
    store.queue.announce(detect()[0])
    return submit(request, store)


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


def drivers(folder: Path) -> list[int]:
    return [process for process, line in processes(folder).items() if DRIVER in line]


def is_measuring(folder: Path, store: Store, trials: int) -> bool:
    """Whether a trial is under way after so many that are stored."""
    return store.count() >= trials and stage(folder) == Stage.TRIAL


def epoch(store: Store, search_id: str) -> int:
    found = store.search(search_id)
    assert found is not None
    return found.lease_epoch


def has(store: Store, search_id: str, state: str) -> bool:
    found = store.search(search_id)
    return found is not None and found.state == state


def epochs_of_trials(store: Store) -> list[int]:
    """The epoch of each trial's driver, oldest first; no two trials are the same write."""
    with store._database.read() as connection:
        rows = connection.execute(text("SELECT uid, search_epoch FROM trials ORDER BY id")).all()
    assert len({uid for uid, _ in rows}) == len(rows) and all(uid for uid, _ in rows)
    return [number for _, number in rows]


def test_whoever_dies_the_search_goes_on_and_a_cancel_leaves_nothing(folder: Path, store: Store, start: Start) -> None:
    search_id = queue(folder, store)
    first = start()
    wait_until(partial(is_measuring, folder, store, 1))

    # The driver is paused in the middle of a trial, past its lease, and another runner takes over.
    (paused,) = drivers(folder)
    os.kill(paused, signal.SIGSTOP)
    expire(store)
    second = start()
    wait_until(lambda: epoch(store, search_id) == 2)
    os.kill(paused, signal.SIGCONT)
    wait_until(lambda: paused not in processes(folder))
    assert first.poll() is None

    # That runner is killed in the middle of a trial: its driver goes with it, and the first runner takes over.
    wait_until(partial(is_measuring, folder, store, store.count() + 1))
    second.kill()
    second.wait()
    wait_until(lambda: has(store, search_id, "succeeded"))
    epochs = epochs_of_trials(store)
    assert epochs == sorted(epochs) and set(epochs) == {1, 2, 3}, "an overtaken driver wrote"
    found = store.search(search_id)
    assert found is not None and found.spent_trials == store.count() == TRIALS
    events = store.queue.events(search_id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [event.body["epoch"] for event in events if event.kind == "running"] == [1, 2, 3]

    # A search that is cancelled in the middle of a trial leaves the runner alone, and nothing else.
    other = queue(folder, store, seed=1)
    wait_until(partial(is_measuring, folder, store, TRIALS))
    store.queue.cancel(other)
    wait_until(lambda: list(processes(folder)) == [first.pid] or first.poll() is not None)
    assert has(store, other, "cancelled")

    # A runner that is told to end gives its search back.
    third = queue(folder, store, seed=2)
    wait_until(lambda: bool(drivers(folder)))
    first.terminate()
    assert first.wait() == 0
    assert has(store, third, "queued")
    wait_until_gone(folder)
    assert strays(folder) == []
