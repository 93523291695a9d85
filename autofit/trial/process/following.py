"""Follows a trial's child: listens to it and to commands until it ends or its time is over, and ends it."""

from __future__ import annotations

import json
import math
import os
import selectors
import time
from dataclasses import dataclass
from typing import Any

from autofit.core.outcome import Outcome
from autofit.trial.limits.host_memory import HostWatch
from autofit.trial.machine.watch import DeviceWatch
from autofit.trial.measure.pace import useful_speed
from autofit.trial.process import classify
from autofit.trial.process.child_process import ChildProcess, has_died
from autofit.trial.request import RECORDING_SECONDS, TrialRequest


class Stopped(Exception):
    """The running trial is no longer wanted."""

    def __init__(self, *, interrupted: bool) -> None:
        super().__init__()
        self.interrupted = interrupted
        """Whether the user has stopped it, and not another rank's failure."""


class Commands:
    """Commands to the fork server: JSON lines read from a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._pending = b""

    def next(self) -> dict[str, Any] | None:
        """The next line; None once the other end has closed."""
        while not self.waiting:
            if not self._read():
                return None
        line, _, self._pending = self._pending.partition(b"\n")
        data: dict[str, Any] = json.loads(line)
        return data

    def check(self) -> None:
        """Read what has arrived. Raises `Stopped` for a stop command, the only one that comes while a trial runs, and
        `EOFError` if the other end has closed."""
        if not self.waiting and not self._read():
            raise EOFError
        command = (self.next() or {}) if self.waiting else {}
        if "stop" in command:
            raise Stopped(interrupted=command["stop"]["interrupted"])

    @property
    def waiting(self) -> bool:
        """Whether a line is already buffered: the descriptor no longer reports it as readable."""
        return b"\n" in self._pending

    def _read(self) -> bool:
        """Buffer what has arrived; whether the other end is still open."""
        chunk = os.read(self.descriptor, 1 << 16)
        self._pending += chunk
        return bool(chunk)


@dataclass(slots=True, kw_only=True)
class Follower:
    """Used once, from one thread."""

    child: ChildProcess
    request: TrialRequest
    commands: Commands
    started: float
    """When the trial began, monotonic seconds."""
    host: HostWatch | None
    """None on a processor."""
    device: DeviceWatch

    def follow(self) -> Outcome | None:
        """The outcome, or None if the child has ended without one: then it has its exit status. Raises `EOFError` if
        the other end of the commands has closed."""
        child = self.child
        try:
            has_ended = self._listen()
        except Stopped as stop:
            child.take_rest()
            if child.result is None and not stop.interrupted:
                return classify.stopped(child.phase)
            return child.result or child.timed_out(time.monotonic() - self.started, interrupted=True)
        finally:
            self.device.end()
        if child.recording:
            child.recording_seconds = time.monotonic() - child.answered_at
        child.end(kill=not has_ended)
        if child.result is None and not has_ended:
            return child.timed_out(min(self._limit_seconds, time.monotonic() - self.started))
        return child.result

    def _listen(self) -> bool:
        """Read events until the child has ended or answered; False once its time is over, or its host's memory, which
        is then the result unless there is one. Raises what the commands raise."""
        child, device = self.child, self.device
        with selectors.DefaultSelector() as selector:
            selector.register(child.events, selectors.EVENT_READ)
            selector.register(self.commands.descriptor, selectors.EVENT_READ)
            while child.result is None or child.recording:
                if self.commands.waiting:
                    self.commands.check()
                if self.host is not None and (exhausted := self.host.exhausted(child.phase)) is not None:
                    child.result = child.result or exhausted
                    return False
                device.follow(child.is_timing)
                left = self._until - time.monotonic()
                if left <= 0:
                    return False
                for key, _ in selector.select(timeout=min(left, 1.0 if self.host is None else 0.1)):
                    if key.fd == self.commands.descriptor:
                        self.commands.check()
                        continue
                    chunk = os.read(child.events, 65536)
                    if not chunk:
                        return True
                    child.take(chunk)
                    device.follow(child.is_timing)
                    if child.result is not None:
                        device.end()  # what it still records is no part of the trial
                if has_died(child.pid):
                    child.take_rest()
                    return True
        return True

    @property
    def _until(self) -> float:
        """When the child's time is over, monotonic seconds."""
        if self.child.recording:
            return self.child.answered_at + RECORDING_SECONDS
        return min(self.started + self._limit_seconds, self.child.useless_at(self._longest_step_seconds))

    @property
    def _judges(self) -> bool:
        """Whether this rank decides how long the trial goes on."""
        return self.request.rendezvous is None or self.request.rendezvous.rank == 0

    @property
    def _limit_seconds(self) -> float:
        return self.request.limit_seconds(earned=self.child.earned or not self._judges)

    @property
    def _longest_step_seconds(self) -> float:
        """An optimizer step beyond which the trial is of no use; infinite if no step is too slow."""
        request = self.request
        useful = useful_speed([rival.tokens_per_second for rival in request.rivals], request.least_tokens_per_second)
        if not useful or not self._judges:
            return math.inf
        return request.job.workload.tokens_per_step / useful
