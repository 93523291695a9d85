"""Many processes on one store, and processes that die."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from sqlalchemy import create_engine, text
from unit.store.conftest import a_trial

from autofit.core.outcome import Trial
from autofit.store import Store, check

ADDER = Path(__file__).with_name("adder.py")


def start(url: str, trial: Trial, count: int) -> subprocess.Popen[str]:
    """A process that adds `trial` to the store `count` times and prints each id."""
    process = subprocess.Popen(
        [sys.executable, str(ADDER), url, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(trial.to_json()))
    process.stdin.close()
    process.stdin = None
    return process


def attempts(url: str) -> list[int]:
    """The attempt of each trial, oldest first."""
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            return list(connection.scalars(text("SELECT attempt FROM trials ORDER BY id")))
    finally:
        engine.dispose()


def test_four_processes_create_and_fill_one_store(url: str) -> None:
    trial, each = a_trial(), 25
    processes = [start(url, trial, each) for _ in range(4)]
    printed = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, printed
    ids = [int(line) for out, _ in printed for line in out.split()]
    assert len(set(ids)) == 4 * each
    assert attempts(url) == list(range(1, 4 * each + 1))
    with Store.open(url, create=False) as store:
        assert store.trials() == [trial] * (4 * each)
        assert len(store.workloads()) == 1
    assert check(url).sound


def test_a_killed_process_loses_nothing_it_reported(url: str) -> None:
    trial = a_trial()
    reported: list[int] = []
    for lines in (1, 20):
        process = start(url, trial, 1_000_000)
        assert process.stdout is not None
        for _ in range(lines):
            reported.append(int(process.stdout.readline()))
        process.kill()
        rest, _ = process.communicate()
        # The last line may be cut off: what counts is what was said in full.
        reported += [int(line) for line in rest.splitlines(keepends=True) if line.endswith("\n")]
    with Store.open(url, create=False) as store:
        kept = {stored.trial_id for stored in store.trials()}
        assert set(reported) <= kept
        # One more may have been kept each time, before it could be reported.
        assert len(kept) <= len(reported) + 2
        store.add(trial)
    assert attempts(url) == list(range(1, len(kept) + 2))
    assert check(url).sound
