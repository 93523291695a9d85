"""What is seen of a trial's device: on the real processor, beside a process that really is busy; on a made card."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from jobs import tiny_request
from unit.trial.fake_nvml import FakeCard, NVMLError_GpuIsLost, install

from autofit.core.device.hardware import Hardware
from autofit.core.device.state import DeviceState
from autofit.core.outcome import Fits
from autofit.core.units import GIB, MIB
from autofit.trial.machine import processor, watch
from autofit.trial.machine.watch import CardWatch, DeviceWatch
from autofit.trial.process.runner import TrialRunner

ON_CPU = Hardware(name="cpu", kind="cpu", device_name="Some CPU", memory_bytes=GIB, cores=1)
SPIN = "import sys; print(flush=True)\nwhile True: pass"


@contextmanager
def spinning(core: int) -> Iterator[int]:
    """A process of its own session that keeps a core busy."""
    code = f"import os; os.sched_setaffinity(0, {{{core}}}); {SPIN}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def one_core() -> Iterator[int]:
    """This process, and what it observes, is confined to one core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield min(allowed)
    os.sched_setaffinity(0, allowed)


def test_another_process_on_the_trials_core_is_seen(one_core: int) -> None:
    with spinning(one_core) as trial, spinning(one_core) as other:
        device_watch = DeviceWatch(ON_CPU, trial, None)
        time.sleep(2.0)
        device_watch.end()
        also = DeviceWatch(ON_CPU, other, None)
    cpu_state = device_watch.state().processor
    assert cpu_state is not None and cpu_state.cores == cpu_state.threads == 1
    assert 0.0 < cpu_state.own_seconds < cpu_state.busy_seconds
    # The two are served alike, however many others there are.
    assert cpu_state.others_seconds > 0.3 * cpu_state.busy_seconds
    assert device_watch.state().doubts(tiny_request().job.hardware) != ()
    assert also.state().seconds == 0.0


def test_a_process_that_has_ended_is_counted_until_it_is_waited_for() -> None:
    code = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        device_watch = DeviceWatch(ON_CPU, process.pid, None)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        device_watch.end()
    cpu_state = device_watch.state().processor
    assert cpu_state is not None and cpu_state.own_seconds >= 0.2


def test_what_is_observed_is_the_timed_part(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(watch.processor, "read", lambda process: None)
    device_watch = DeviceWatch(ON_CPU, os.getpid(), None)
    for clock[0], is_timing in ((1.0, False), (4.0, True), (5.0, True), (6.5, False), (8.0, False)):
        device_watch.follow(is_timing)
    clock[0] = 9.0
    device_watch.end()
    assert device_watch.state() == DeviceState(seconds=2.5)
    whole = DeviceWatch(ON_CPU, os.getpid(), None)
    clock[0] = 12.0
    whole.end()
    assert whole.state().seconds == 3.0


def test_a_trial_reports_the_state_of_its_device(warm: TrialRunner) -> None:
    attempt = warm.attempt(tiny_request(timing_seconds=0.5))
    assert isinstance(attempt.outcome, Fits) and attempt.device_state is not None
    assert 0.0 < attempt.device_state.seconds < attempt.seconds
    cpu_state = attempt.device_state.processor
    assert cpu_state is not None and cpu_state.own_seconds > 0.0


def test_a_kernel_that_counts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(processor, "PROC", tmp_path)
    assert processor.read(os.getpid()) is None


def card(**state: object) -> FakeCard:
    return FakeCard("GPU-a", state={f"nvmlDeviceGet{name}": value for name, value in state.items()})


def test_a_card_is_seen_at_its_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, masks = iter([1800, 1200, 1700]), iter([0x4, 0x20, 0x0])
    errors = iter([5, 5, 6, 6])
    made = card(
        ClockInfo=lambda kind: next(clocks) if kind == 1 else 2619,
        MaxClockInfo=1980,
        PowerManagementLimit=700_000,
        CurrentClocksThrottleReasons=lambda: next(masks),
        TotalEccErrors=lambda *kinds: next(errors),
    )
    install(monkeypatch, made)
    card_watch = CardWatch(os.getpid(), 300 * MIB)
    for _ in range(3):
        card_watch.look()
    state = card_watch.state()
    assert state is not None
    assert (state.sm_clock_mhz, state.sm_clock_max_mhz, state.throttle_mask) == (1200, 1980, 0x24)
    assert (state.power_limit_watts, state.power_limit_default_watts) == (700.0, 700.0)
    assert (state.memory_errors, state.others_bytes) == (1, 300 * MIB)
    assert state.others_share is None, "it was not told"


def test_a_card_that_idles_between_launches_is_not_at_its_power_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, masks = iter([1800, 300]), iter([0x4, 0x1])
    install(
        monkeypatch,
        card(
            ClockInfo=lambda kind: next(clocks) if kind == 1 else 2619,
            MaxClockInfo=1980,
            CurrentClocksThrottleReasons=lambda: next(masks),
        ),
    )
    card_watch = CardWatch(os.getpid(), 0)
    for _ in range(2):
        card_watch.look()
    state = card_watch.state()
    assert state is not None and (state.sm_clock_mhz, state.throttle_reasons) == (1800, ())


def sample(pid: int, at: int, share: int) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, timeStamp=at, smUtil=share)


@pytest.mark.parametrize(("own_pid", "share"), [(None, 0.4), (1, None)])
def test_the_work_of_others_is_told_where_processes_can_be_told_apart(
    monkeypatch: pytest.MonkeyPatch, own_pid: int | None, share: float | None
) -> None:
    own_pid = own_pid or os.getpid()
    samples = [sample(own_pid, 9_000_000, 60), sample(7, 8_900_000, 40), sample(7, 1, 5), sample(8, 2_000_000, 99)]
    made = card(ComputeRunningProcesses=[SimpleNamespace(pid=own_pid)], ProcessUtilization=lambda since: samples)
    install(monkeypatch, made)
    card_watch = CardWatch(os.getpid(), None)
    card_watch.look()
    state = card_watch.state()
    assert state is not None and state.others_share == share


def test_of_an_instance_the_card_shows_its_heat_and_nobody_who_else_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML counts processes' work for whole cards without MIG alone; the clock is that of all instances."""
    whole = card(
        ClockInfo=lambda kind: 900,
        MaxClockInfo=1980,
        CurrentClocksThrottleReasons=lambda: 0x40,
        ComputeRunningProcesses=[SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=7)],
    )
    whole.divided, whole.instances = True, [FakeCard("MIG-a"), FakeCard("MIG-b")]
    install(monkeypatch, whole)
    card_watch = CardWatch(os.getpid(), 4 * GIB)
    card_watch.look()
    state = card_watch.state()
    assert state is not None and (state.uuid, state.sm_clock_mhz, state.others_share) == ("MIG-a", 900, None)
    doubts = state.doubts(None)
    assert doubts[0] == "throttled: heat (hardware)" and "another process held 4.00 GiB" in doubts[1]


def test_a_card_that_goes_away_leaves_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, card(ClockInfo=lambda kind: 1500))
    card_watch = CardWatch(os.getpid(), None)
    card_watch.look()
    fake.failure = NVMLError_GpuIsLost("GPU is lost")
    card_watch.look()
    state = card_watch.state()
    assert state is not None and state.sm_clock_mhz == 1500
    assert CardWatch(os.getpid(), None).state() is None
