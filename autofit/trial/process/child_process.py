"""A trial's child as its parent sees it: what it has sent, whether it lives, and its end with everything it started."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from autofit.core.outcome import Outcome, TimedOut
from autofit.trial.measure.pace import ONCE_SECONDS
from autofit.trial.process import classify
from autofit.trial.process.events import Event

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
KILL_SECONDS = 60.0
"""How long the kernel may take to end a process that was killed: one that waits for a driver that hangs never ends."""
_STUCK: set[int] = set()
"""Killed children that have not ended: to wait for them would be to wait for the driver."""


@dataclass(slots=True)
class ChildProcess:
    """A running child; used from one thread."""

    pid: int
    """0 once it has been reaped."""
    events: int
    """Read end of the pipe."""
    output: IO[bytes]
    """Its standard output and standard error: an unnamed file, which nobody needs to remove."""
    phase: str = "start"
    phases_entered: int = 0
    room_bytes: int | None = None
    """What was left of the memory limit when the phase began; None without a limit."""
    is_timing: bool = False
    """Whether its timed part has begun and not ended."""
    result: Outcome | None = None
    recording: bool = False
    """Whether recordings follow the result."""
    answered_at: float = 0.0
    """When the result came, monotonic seconds."""
    recording_seconds: float = 0.0
    """What recordings took after the result; not part of the trial's time."""
    earned: bool = False
    """Whether the trial has shown that it may beat every rival."""
    began: tuple[float, float] | None = None
    """When the present work began, monotonic seconds, and the share of an optimizer step that it is at least; None
    before any."""
    shown_seconds: float = 0.0
    """What its micro-steps have shown that an optimizer step takes at least."""
    peak_bytes: int | None = None
    """The most memory of any phase that has ended; None before the first."""
    timed_seconds: tuple[float, ...] = ()
    """Of each step since its timed part has begun."""
    status: int = 0
    """Its exit status once it has ended, or minus the signal."""
    is_stuck: bool = False
    """Whether it was killed and has not ended."""
    _pending: bytes = b""
    _others: frozenset[int] = frozenset()
    """Children that its parent had beside it."""

    def __post_init__(self) -> None:
        self._others = frozenset(_children()) - {self.pid}

    def take(self, chunk: bytes) -> None:
        """Note the events in `chunk`, which has come through the pipe."""
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            # A broken event is no result: the exit status decides.
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                self._note(Event.from_json(json.loads(line)))

    def _note(self, event: Event) -> None:
        if event.phase is not None:
            self.phase, self.room_bytes = event.phase, event.room_bytes
            self.phases_entered += 1
        if event.share is not None:
            self.began = time.monotonic(), event.share
        if event.timing is not None:
            self.is_timing = event.timing
        if event.step_seconds is not None and self.is_timing:
            self.timed_seconds += (float(event.step_seconds),)
        if event.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, int(event.peak_bytes))
        self.earned = self.earned or event.earned
        self.shown_seconds = max(self.shown_seconds, event.least_step_seconds)
        if event.result is not None:
            self.result, self.recording, self.answered_at = event.result, event.recording, time.monotonic()

    def take_rest(self) -> None:
        """Note the events that are in the pipe without waiting for more; a grandchild may hold it open."""
        os.set_blocking(self.events, False)
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.events, 65536):
                self.take(chunk)

    def timed_out(self, seconds: float, *, interrupted: bool = False) -> TimedOut:
        """The outcome, with what it has measured so far, if it has not ended after `seconds`."""
        step_seconds = self.least_step_seconds
        return classify.timed_out(
            deadline_seconds=seconds,
            phase=self.phase,
            interrupted=interrupted,
            phases_entered=self.phases_entered,
            least_step_seconds=step_seconds,
            is_proven=step_seconds is not None and step_seconds == self.shown_seconds,
            peak_bytes=self.peak_bytes,
            timed_seconds=self.timed_seconds,
        )

    @property
    def least_step_seconds(self) -> float | None:
        """Lower bound on the seconds of an optimizer step: what micro-steps have shown, or the present work if it has
        not ended; None if there is none."""
        if self.began is None:
            return self.shown_seconds or None
        at, share = self.began
        return max(self.shown_seconds, (time.monotonic() - at - ONCE_SECONDS) / share) or None

    def useless_at(self, step_seconds: float) -> float:
        """When, in monotonic seconds, that bound has shown that an optimizer step takes longer than `step_seconds`."""
        if self.began is None:
            return math.inf
        at, share = self.began
        return at + ONCE_SECONDS + share * step_seconds

    def end(self, *, kill: bool) -> None:
        """Reap it and kill its whole process group, at once or after it had two seconds to exit by itself, so that its
        exit status is its own. Safe to call twice."""
        if self.pid == 0:
            return
        if not kill:
            _ends_within(self.pid, 2.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.is_stuck = not _ends_within(self.pid, KILL_SECONDS)
        if self.is_stuck:
            self.status = -signal.SIGKILL
            _STUCK.add(self.pid)
        else:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        os.close(self.events)
        end_orphans(self._others)


def has_died(pid: int) -> bool:
    """Whether a child has ended; it is not reaped. Raises `ChildProcessError` if there is none of that number."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _ends_within(pid: int, seconds: float) -> bool:
    """Whether a child ends in that time; it is not reaped."""
    until = time.monotonic() + seconds
    while not has_died(pid):
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def tail(output: int) -> str:
    """The last of what was written to a file with this descriptor, up to 8 KiB; nothing where it is no file."""
    try:
        return os.pread(output, 8192, max(0, os.fstat(output).st_size - 8192)).decode(errors="replace")
    except OSError:
        return ""


def adopt_orphans() -> None:
    """Have this process inherit what its children's children leave behind."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, so that no trial outlives a killed host."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def end_orphans(others: frozenset[int] = frozenset()) -> None:
    """Kill and reap grandchildren that left the process group: as their subreaper, this process inherits them.
    `others` are children that are not the trial's."""
    while orphans := [pid for pid in _children() if pid not in others and pid not in _STUCK]:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                if _ends_within(pid, KILL_SECONDS):
                    os.waitpid(pid, 0)
                else:
                    _STUCK.add(pid)
