"""A trial on an accelerator that uses up its host's memory is ended before the kernel has to choose whom to kill."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest
from unit.trial.fake_nvml import FakeCard, install

from autofit.outcome import Crashed, Outcome, OutOfMemory
from autofit.trial import host, process_memory
from autofit.trial.commands import Commands

GIB = 1024**3
DEADLINE_SECONDS = 0.6


def hanging(monkeypatch: pytest.MonkeyPatch, left: list[int | None], kind: str = "cuda") -> tuple[Outcome, float]:
    """The outcome of a trial that never ends, and its seconds, where the host has `left` bytes at each look."""
    install(monkeypatch, FakeCard("GPU-a"))
    looks = itertools.chain(left, itertools.repeat(left[-1]))
    monkeypatch.setattr(process_memory, "host_available", lambda: next(looks))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    read_end, write_end = os.pipe()
    started = time.monotonic()
    try:
        request = {"hardware": {"kind": kind}, "deadline_seconds": DEADLINE_SECONDS}
        outcome, _ = host.Host("entries:hang", spawn=False).run(request, Commands(read_end))
    finally:
        os.close(write_end)
        os.close(read_end)
    return outcome, time.monotonic() - started


def test_it_is_out_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, seconds = hanging(monkeypatch, [64 * GIB, 40 * GIB, 2 * GIB, GIB // 2])
    assert isinstance(outcome, OutOfMemory) and outcome.host, outcome
    assert outcome.phase == "forward"
    assert "512 MiB were left of the 64.00 GiB" in outcome.reason
    assert seconds < DEADLINE_SECONDS, "ended at once"


def test_a_small_host_needs_a_smaller_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hanging(monkeypatch, [4 * GIB, GIB])[0].kind == "timed_out"
    assert isinstance(hanging(monkeypatch, [4 * GIB, 4 * GIB, GIB // 4])[0], OutOfMemory)


def test_a_host_that_others_had_filled_before_is_no_fault_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, _ = hanging(monkeypatch, [GIB, GIB // 16])
    assert isinstance(outcome, Crashed) and outcome.transient, outcome
    assert "other processes hold the rest" in outcome.reason


@pytest.mark.parametrize(("kind", "left"), [("cpu", GIB // 16), ("cuda", None)])
def test_others_are_not_watched(kind: str, left: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU each process has a limit of its own; and some hosts do not say what is left."""
    assert hanging(monkeypatch, [64 * GIB if left else None, left], kind)[0].kind == "timed_out"
