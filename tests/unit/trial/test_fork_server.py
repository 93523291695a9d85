"""The fork server keeps its hands off the device, and waits until a trial's memory is back."""

from __future__ import annotations

import errno
import itertools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import tiny_job, tiny_request
from unit.trial.fake_cuda import install_cuda
from unit.trial.fake_nvml import FakeCard, NVMLError_GpuIsLost, install

from autofit.core.device.hardware import Hardware
from autofit.core.outcome import Crashed, Fits
from autofit.core.units import MIB
from autofit.trial import request as asked_for
from autofit.trial.attempt import Attempt
from autofit.trial.machine import nvml
from autofit.trial.process import child, child_process, fork_server, runner
from autofit.trial.process.events import EventPipe
from autofit.trial.process.following import Commands, Follower
from autofit.trial.process.fork_server import ForkServer
from autofit.trial.process.runner import TrialRunner, trial_environment
from autofit.trial.request import TrialRequest

CARD = Hardware(name="h100-80g", kind="cuda", device_name="NVIDIA H100 80GB HBM3", memory_bytes=81089 * MIB)


def on_card(**request: Any) -> TrialRequest:
    return tiny_request(job=replace(tiny_job(), hardware=CARD), **request)


@pytest.fixture
def commands() -> Iterator[Commands]:
    """Commands that nobody gives."""
    read_end, write_end = os.pipe()
    yield Commands(read_end)
    os.close(write_end)
    os.close(read_end)


@pytest.fixture
def fake_bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bitsandbytes that initialises the device when it is imported, and leaves a trace of it."""
    trace = tmp_path / "imported"
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text(
        f"import torch\nopen({str(trace)!r}, 'w').close()\ntorch.cuda.is_initialized = lambda: True\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return trace


def test_the_fork_server_of_gpu_trials_postpones_bitsandbytes(
    fake_bitsandbytes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    code = """
from autofit.trial.process.fork_server import ForkServer, device_is_touched
ForkServer("entries:none").preload("llama")
print(device_is_touched())
"""
    command, environment = [sys.executable, "-c", code], trial_environment("cuda")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
    assert not fake_bitsandbytes.exists()


def test_a_fork_server_that_has_touched_the_device_starts_children_anew(fake_bitsandbytes: Path) -> None:
    # On the CPU nothing is postponed: the fake's import shows what the check would see.
    code = """
from autofit.trial.process.fork_server import ForkServer, device_is_touched
made = ForkServer("entries:none")
made.preload(None)
print(made._spawn, device_is_touched())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
    assert fake_bitsandbytes.exists()


def test_a_postponed_library_counts_as_installed_and_can_be_imported_afterwards(fake_bitsandbytes: Path) -> None:
    code = """
import os, sys
os.environ["AUTOFIT_DEVICE_KIND"] = "cuda"
from autofit.trial.process.fork_server import ForkServer
ForkServer("entries:none").preload("llama")
from peft.import_utils import is_bnb_available
from transformers.utils import is_bitsandbytes_available
assert "bitsandbytes" not in sys.modules
import importlib.util
assert is_bnb_available() and importlib.util.find_spec("bitsandbytes") is not None
import bitsandbytes
print(bitsandbytes.__file__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(fake_bitsandbytes.parent / "bitsandbytes" / "__init__.py")


def test_trials_get_the_device_that_was_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeCard("GPU-a"), FakeCard("GPU-b"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert trial_environment("cuda")["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert trial_environment("cuda", 1)["CUDA_VISIBLE_DEVICES"] == "GPU-a", "the second rank's"
    assert trial_environment("cpu")["CUDA_VISIBLE_DEVICES"] == "1,0"


def looks_at_the_card(monkeypatch: pytest.MonkeyPatch, commands: Commands, held: Iterable[int]) -> int:
    """How often a trial's parent looks at what all processes hold of the card's memory, which is `held` at each look:
    the first is before the trial."""
    install(monkeypatch, FakeCard("GPU-a"))
    looks: list[int] = []
    each = iter(held)

    def look() -> int:
        looks.append(next(each))
        return looks[-1]

    monkeypatch.setattr(nvml, "held_bytes", look)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    ForkServer("entries:killed").run(on_card(), commands)
    return len(looks)


FREE, TAKEN = 1000 * MIB, 60_000 * MIB


def test_the_next_trial_waits_for_the_devices_memory(monkeypatch: pytest.MonkeyPatch, commands: Commands) -> None:
    monkeypatch.setattr(fork_server, "DEVICE_BACK_SECONDS", 3600.0)
    assert looks_at_the_card(monkeypatch, commands, [FREE, *[TAKEN] * 5, FREE, FREE]) == 7


def test_memory_that_never_comes_back_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, commands: Commands
) -> None:
    monkeypatch.setattr(fork_server, "DEVICE_BACK_SECONDS", 0.3)
    assert looks_at_the_card(monkeypatch, commands, itertools.chain([FREE], itertools.repeat(TAKEN))) > 2


def test_a_card_that_falls_off_the_bus_is_no_fault_of_the_config(
    monkeypatch: pytest.MonkeyPatch, commands: Commands
) -> None:
    fake = install(monkeypatch, FakeCard("GPU-a"))

    def lost(follower: Follower) -> bool:
        fake.failure = NVMLError_GpuIsLost("GPU is lost")
        return original(follower)

    original = Follower._listen
    monkeypatch.setattr(Follower, "_listen", lost)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    attempt = ForkServer("entries:raises").run(on_card(), commands)
    assert isinstance(attempt.outcome, Crashed) and attempt.outcome.transient
    assert attempt.outcome.reason == "the device is gone: GPU is lost"
    assert "exited with status 1" in attempt.outcome.stderr_tail


def test_children_that_cannot_use_the_device_after_a_fork_are_spawned(
    monkeypatch: pytest.MonkeyPatch, commands: Commands
) -> None:
    server = ForkServer("entries:none")
    spawned = []

    def run(*_: object) -> Attempt:
        spawned.append(server._spawn)
        reason = "kaboom" if server._spawn else "the device has failed: RuntimeError: CUDA driver initialization failed"
        return Attempt(outcome=Crashed(reason=reason, phase="setup", transient=True), seconds=1.0)

    monkeypatch.setattr(server, "_run", run)
    outcome = server.run(tiny_request(), commands).outcome
    assert isinstance(outcome, Crashed) and outcome.reason == "kaboom"
    assert spawned == [False, True]


def test_spawned_children_measure_as_forked_ones_do(warm: TrialRunner, commands: Commands) -> None:
    server = ForkServer(fork_server.DEFAULT_ENTRY)
    server._spawn = True
    a, b = server.run(tiny_request(), commands).outcome, warm.attempt(tiny_request()).outcome
    assert isinstance(a, Fits) and isinstance(b, Fits), (a, b)
    assert a.measurement.losses[0] == pytest.approx(b.measurement.losses[0], rel=1e-5)


def test_a_trial_that_the_driver_does_not_let_go_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, commands: Commands
) -> None:
    monkeypatch.setattr(child_process, "KILL_SECONDS", 0.1)
    monkeypatch.setattr(child_process, "_STUCK", set())
    monkeypatch.setattr(child_process, "has_died", lambda pid: False)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    attempt = ForkServer("entries:hang").run(tiny_request(deadline_seconds=0.5), commands)
    (stuck,) = child_process._STUCK
    assert os.waitpid(stuck, 0)[0] == stuck
    assert isinstance(attempt.outcome, Crashed) and attempt.outcome.transient
    assert "driver does not let" in attempt.outcome.reason and "not finished" in attempt.outcome.stderr_tail


def test_what_its_parent_runs_beside_a_trial_outlives_that(monkeypatch: pytest.MonkeyPatch, commands: Commands) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as beside:
        attempt = ForkServer("entries:stubborn_grandchild").run(tiny_request(), commands)
        assert isinstance(attempt.outcome, Crashed) and attempt.outcome.exit_code == 3
        assert beside.poll() is None
        beside.communicate(b"end\n", timeout=60)
    assert beside.returncode == 0


def test_a_full_disk_is_no_fault_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    with TrialRunner() as started:
        imports = "import tempfile; from autofit.trial.process.fork_server import main"
        code = f"{imports}; tempfile.tempdir = '/nowhere'; main()"
        started._command = [sys.executable, "-c", code, "--entry", "builtins:print"]
        outcome = started.attempt(tiny_request()).outcome
        assert isinstance(outcome, Crashed) and outcome.transient
        assert "/nowhere" in outcome.reason


@pytest.mark.parametrize("anew", [False, True])
def test_a_child_that_cannot_be_started_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, commands: Commands, anew: bool
) -> None:
    def refused(*_: object, **__: object) -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    server = ForkServer("entries:none")
    server._spawn = anew
    monkeypatch.setattr(os, "fork", refused)
    monkeypatch.setattr(subprocess, "Popen", refused)
    before = set(os.listdir("/proc/self/fd"))
    outcome = server.run(tiny_request(), commands).outcome
    assert isinstance(outcome, Crashed) and outcome.transient and "temporarily unavailable" in outcome.reason
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_fork_server_that_cannot_start_is_no_fault_of_the_config() -> None:
    with TrialRunner() as started:
        started._command = [sys.executable, "-c", "raise SystemExit(7)"]
        outcome = started.attempt(tiny_request()).outcome
    assert isinstance(outcome, Crashed) and outcome.transient and outcome.exit_code == 7


def test_the_time_of_each_child_begins_when_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fork server imports before that, and a first child that could not be forked, take nothing of it."""
    waits: list[float] = []

    class Poller:
        def __init__(self) -> None:
            self._poller = select.poll()
            self.register = self._poller.register

        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            waits.append(milliseconds)
            return self._poller.poll(milliseconds)

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    monkeypatch.setattr(runner, "select", SimpleNamespace(poll=Poller, POLLIN=select.POLLIN))
    with TrialRunner(entry="entries:cannot_be_forked") as started:
        outcome = started.attempt(tiny_request(deadline_seconds=600.0)).outcome
    assert isinstance(outcome, Crashed) and fork_server.FORK_FAILURES[0] in outcome.stderr_tail
    # Until the first begins, until the second does, and until it has ended.
    assert waits == [1000.0 * (600.0 + runner.GRACE_SECONDS)] * 3


def test_asking_is_the_first_writing_down(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(asked_for, "time", SimpleNamespace(monotonic=lambda: now))
    request = tiny_request()
    written: dict[str, Any] = json.loads(json.dumps(request.to_json()))
    now = 103.0
    passed_on = TrialRequest.from_json(written)
    assert passed_on == request
    again = json.loads(json.dumps(passed_on.to_json()))
    assert again["asked"] == written["asked"]
    assert TrialRequest.from_json(again).seconds_since_asked == 3.0
    assert TrialRequest.from_json({**again, "asked": ["another boot", 1.0]}).seconds_since_asked == 0.0
    assert request.seconds_since_asked == 0.0, "it was not written down"


def test_what_was_waited_for_is_not_there_to_wait_for_again() -> None:
    asked = tiny_request(deadline_seconds=900.0, wait_seconds=600.0)
    queued = asked.after_waiting(500.0)
    assert (queued.wait_seconds, queued.deadline_seconds) == (100.0, 100.0)
    assert queued.after_waiting(60.0) == asked.after_waiting(560.0)


def test_overhead_counts_from_the_asking(warm: TrialRunner) -> None:
    clock, now = tiny_request().to_json()["asked"]
    late = warm.attempt(tiny_request(timing_seconds=0.1, asked=(clock, now - 10_000.0))).outcome
    assert isinstance(late, Fits)
    assert late.measurement.overhead_seconds > 10_000.0


def test_a_busy_device_is_a_transient_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    install_cuda(monkeypatch, others=20_000 * MIB)
    outcome = child._run(on_card(memory_limit_bytes=20_000 * MIB), EventPipe(2), time.monotonic()).outcome
    assert isinstance(outcome, Crashed) and outcome.transient, outcome
    assert "other processes hold 19.53 GiB" in outcome.reason
