"""Trials of different processes exclude each other on a device, and nothing but a living holder does."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import tiny_job, tiny_request
from unit.trial.fake_nvml import FakeCard, install

from autofit.core.outcome import Crashed, Fits
from autofit.techniques import complete
from autofit.trial.machine import device_lock
from autofit.trial.machine.device_lock import GivenUp, held, names
from autofit.trial.process import group_runner
from autofit.trial.process.group_runner import GroupRunner, tell_of_waiting

HOLD = "import sys; from autofit.trial.machine.device_lock import held\n"
HOLD += "with held(sys.argv[1:]): print('held', flush=True); input()"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody else's locks."""
    monkeypatch.setenv("AUTOFIT_LOCKS", str(tmp_path))
    monkeypatch.setattr(device_lock, "POLL_SECONDS", 0.01)
    return tmp_path


@contextmanager
def another_holds(*devices: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the locks until it gets a line, or dies."""
    command = [sys.executable, "-c", HOLD, *devices]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        try:
            yield other
        finally:
            other.kill()


@pytest.mark.parametrize("ending", ["released", "killed"])
def test_a_lock_is_had_when_its_holder_lets_go_or_dies(ending: str) -> None:
    holders: list[int | None] = []
    with another_holds("GPU-a") as other:

        def end(holder: int | None) -> None:
            holders.append(holder)
            assert other.stdin is not None
            if ending == "killed":
                os.kill(other.pid, signal.SIGKILL)
            else:
                print(file=other.stdin, flush=True)

        with held(["GPU-a"], waiting=end) as waited:
            assert waited > 0.0
        with held(["GPU-a"], waiting=end) as waited:
            assert holders == [other.pid], "it is holders once, and not where nothing is waited for"


def test_other_devices_are_free() -> None:
    holders: list[int | None] = []
    with another_holds("GPU-a"), held(["GPU-b"], waiting=holders.append, unwanted=lambda: True):
        assert holders == [], "nobody is waited for"


def test_groups_that_share_a_device_do_not_wait_for_each_other_for_ever() -> None:
    with another_holds("GPU-a"):
        with pytest.raises(GivenUp), held(["GPU-b", "GPU-a"], unwanted=lambda: True):
            pass
        with held(["GPU-b"], unwanted=lambda: True):  # what was taken is given back
            pass


def test_no_place_for_a_lock_is_no_error(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFIT_LOCKS", str(own_folder / "none"))
    with held(["cpu"]) as waited:
        assert waited < 60.0
    (own_folder / "target").write_text("mine")
    monkeypatch.setenv("AUTOFIT_LOCKS", str(own_folder))
    (own_folder / "autofit-cpu.lock").symlink_to(own_folder / "target")
    with held(["cpu"]):
        assert (own_folder / "target").read_text() == "mine"


def test_every_user_may_take_it(own_folder: Path) -> None:
    before = os.umask(0o077)
    try:
        with held(["cpu"]):
            pass
    finally:
        os.umask(before)
    assert (own_folder / "autofit-cpu.lock").stat().st_mode & 0o777 == 0o666


def test_each_card_has_a_lock_and_the_processor_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeCard("GPU-a"), FakeCard("GPU-b"), FakeCard("GPU-c"))
    assert names("cuda", 2) == ["GPU-a", "GPU-b"] and names("cpu", 2) == ["cpu"]
    install(monkeypatch)
    assert names("cuda") == ["cuda"]


def test_a_trial_waits_for_another_processes_and_its_deadline_with_it(
    pair: GroupRunner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of one trial share the lock; what it waits is none of its seconds."""
    with another_holds("cpu") as other, caplog.at_level(logging.WARNING):
        timer = threading.Timer(0.5, other.kill)

        def tell(holder: int | None) -> None:
            timer.start()
            tell_of_waiting(holder)

        monkeypatch.setattr(group_runner, "tell_of_waiting", tell)
        started = time.monotonic()
        ddp = complete({"sharding": "ddp", "micro_batch": 1})
        attempt = pair.attempt(tiny_request(ddp, job=tiny_job(devices=2), timing_seconds=0.1))
        elapsed = time.monotonic() - started
        assert isinstance(attempt.outcome, Fits)
        timer.join()
    assert [r.getMessage() for r in caplog.records if "waiting for another" in r.getMessage()] == [
        f"autofit: waiting for another autofit trial on this device (pid {other.pid})"
    ]
    assert attempt.seconds <= elapsed - 0.5, "it waited for as long at least"


def test_who_waits_can_be_closed() -> None:
    with another_holds("cpu"), GroupRunner(entry="builtins:print") as runner:
        threading.Timer(0.3, runner.close).start()
        attempt = runner.attempt(tiny_request())
    assert isinstance(attempt.outcome, Crashed) and attempt.outcome.transient and attempt.seconds == 0.0
