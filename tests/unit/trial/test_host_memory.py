"""A trial on an accelerator that uses up its host's memory is ended before the kernel has to choose whom to kill."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import tiny_job, tiny_request
from unit.trial.fake_nvml import FakeCard, NVMLError_NotSupported, install

from autofit.core.outcome import Crashed, Outcome, OutOfMemory
from autofit.core.units import GIB
from autofit.trial.measure import process_memory
from autofit.trial.process import fork_server
from autofit.trial.process.child_process import ChildProcess
from autofit.trial.process.following import Commands

NEVER = 3600.0
"""A deadline in seconds that no trial here may reach."""

USUAL = FakeCard("GPU-a")


def hanging(
    monkeypatch: pytest.MonkeyPatch,
    left: list[int | None],
    kind: str = "cuda",
    *,
    deadline: float = 0.6,
    card: FakeCard = USUAL,
) -> Outcome:
    """The outcome of a trial that never ends, where the host has `left` bytes at each look: at the first before it
    enters a phase, at the others after."""
    install(monkeypatch, card)
    entered: list[bytes] = []
    take = ChildProcess.take

    def noted(self: ChildProcess, chunk: bytes) -> None:
        take(self, chunk)
        entered.append(chunk)

    monkeypatch.setattr(ChildProcess, "take", noted)
    looks = itertools.chain(left[1:], itertools.repeat(left[-1]))
    monkeypatch.setattr(process_memory, "host_available", lambda: next(looks) if entered else left[0])
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    read_end, write_end = os.pipe()
    try:
        job = tiny_job()
        hardware = replace(job.hardware, kind=kind)
        request = tiny_request(job=replace(job, hardware=hardware), deadline_seconds=deadline)
        outcome = fork_server.ForkServer("entries:hang").run(request, Commands(read_end)).outcome
    finally:
        os.close(write_end)
        os.close(read_end)
    return outcome


def test_it_is_out_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = hanging(monkeypatch, [64 * GIB, 40 * GIB, 2 * GIB, GIB // 2], deadline=NEVER)
    assert isinstance(outcome, OutOfMemory) and outcome.host, outcome
    assert outcome.phase == "forward"
    assert "512 MiB were left of the 64.00 GiB" in outcome.reason


def test_where_the_device_has_the_hosts_memory_it_is_out_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"nvmlDeviceGetComputeRunningProcesses": []}
    gb10 = FakeCard("GPU-a", memory_failure=NVMLError_NotSupported("Not Supported"), state=state)
    outcome = hanging(monkeypatch, [64 * GIB, GIB // 2], deadline=NEVER, card=gb10)
    assert isinstance(outcome, OutOfMemory) and not outcome.host, outcome


def test_a_small_host_needs_a_smaller_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hanging(monkeypatch, [4 * GIB, GIB]).kind == "timed_out"
    assert isinstance(hanging(monkeypatch, [4 * GIB, 4 * GIB, GIB // 4], deadline=NEVER), OutOfMemory)


def test_a_host_that_others_had_filled_before_is_no_fault_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = hanging(monkeypatch, [GIB, GIB // 16], deadline=NEVER)
    assert isinstance(outcome, Crashed) and outcome.transient, outcome
    assert "other processes hold the rest" in outcome.reason


@pytest.mark.parametrize(("kind", "left"), [("cpu", GIB // 16), ("cuda", None)])
def test_others_are_not_watched(kind: str, left: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU each process has a limit of its own; and some hosts do not say what is left."""
    assert hanging(monkeypatch, [64 * GIB if left else None, left], kind).kind == "timed_out"
