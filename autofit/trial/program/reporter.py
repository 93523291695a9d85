"""The program's side of a trial: what `autofit.step` and `autofit.TrainerCallback` do where a trial runs them."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from autofit.core.outcome import PHASES, Diverged, Fits, Measurement, Outcome, OutOfMemory, Unsupported
from autofit.core.units import format_bytes
from autofit.trial.measure.divergence import not_finite
from autofit.trial.measure.figures import MOST_REPEATS, is_settled, measured
from autofit.trial.measure.pace import OVERFLOWS, Pace, TooSlow, least_repeats, warm_ups
from autofit.trial.process.classify import memory_failure
from autofit.trial.process.events import Event, EventPipe
from autofit.trial.program.environment import REPORT_TO
from autofit.trial.program.step_clock import StepClock
from autofit.trial.request import TrialRequest

if TYPE_CHECKING:
    from autofit.trial.measure.meter import MemoryReading, Meter


def step(loss: Any = None) -> None:
    """Tell autofit that an optimizer step is done; `loss` is its loss, a number or a tensor, where there is one.

    Call it after each step. In a trial of `autofit search --command` it measures, and never returns once enough is
    known: the trial ends the program then. Elsewhere it does nothing.
    """
    if REPORT_TO in os.environ:
        session().step(loss)


@cache
def session() -> Session:
    """The trial that this process reports to; there must be one."""
    return Session(os.environ[REPORT_TO])


class Session:
    """One trial, measured from inside of the process that trains. Used from one thread."""

    def __init__(self, place: str) -> None:
        """Begin to report, with the memory limit enforced from now on."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(f"\0{place}")
        with self._socket.makefile("rb") as lines:
            start = json.loads(lines.readline())
        self.request = TrialRequest.from_json(start["request"])
        self._asked_at, self._started_at = float(start["asked_at"]), float(start["started_at"])
        self._events = EventPipe(self._socket.fileno())
        self._events.enter("build")
        self._pace = Pace.of(self.request, accumulation=1)  # whole steps are judged
        self.steps = 0
        """Optimizer steps that were reported."""
        self.is_timed = False
        """Whether enough steps are timed: what follows is no part of a step's time."""
        self._stopped_early = False
        self._step_peak = 0
        """Bytes at the peak of the steps, with what came before them."""
        self._phase = ExitStack()
        """Closes the phase that has begun between steps."""
        self._goes_on = False
        self._read_steps = 0
        """Of those, the ones that the device has finished for sure."""
        self._timing_since: float | None = None
        self._setup_seconds = 0.0
        self._seconds: list[float] = []
        self._in_use: list[int] = []
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._process = os.getpid()
        self._refused = 0
        """Allocations that the device had refused before the limit was enforced."""
        self._meter: Meter = self._guarded(lambda: self._enforced(start["held_bytes"]))
        self._clock: StepClock[tuple[Any, int]] = StepClock(self._meter)
        """Each step comes with its loss and the bytes in use at its end."""

    def begin(self, *, goes_on: bool = False) -> None:
        """Training begins: what was built before it is no part of its memory. With `goes_on`, the trial does not end
        once steps are timed, but when it is told to `succeed`."""
        self._goes_on = goes_on
        self._guarded(self._meter.reset)
        self._seconds.clear()
        self._in_use.clear()
        self.steps, self._read_steps, self._timing_since = 0, 0, None
        self._clock.begin()
        self._events.enter("step")

    def refuse(self, reason: str) -> NoReturn:
        """End the trial, because the program trains something else than it was asked to."""
        self._finish(Unsupported(reason=reason))

    def step(self, loss: Any = None) -> None:
        """An optimizer step was issued."""
        if os.getpid() != self._process or self.is_timed:
            return  # a fork that has the socket too, or a step between phases
        self._events.enter("step")
        self.steps += 1
        self._events.send(Event(steps=self.steps))
        kept = loss.detach() if hasattr(loss, "detach") else loss
        for seconds, (issued_loss, in_use) in self._clock.end_step((kept, self._meter.in_use())):
            self._read_steps += 1
            if issued_loss is not None:
                is_number = isinstance(issued_loss, int | float)
                self.learned(float(issued_loss) if is_number else self._meter.scalar(issued_loss))
            if seconds is not None:
                self._take(seconds, in_use)

    def learned(self, loss: float | None = None, gradient_norm: float | None = None) -> None:
        """The loss of a step, in nats per token, and its gradient's norm, as far as the program tells them."""
        self._losses += [] if loss is None else [loss]
        self._norms += [] if gradient_norm is None else [gradient_norm]
        overflows = self.is_overflowing and self.steps < OVERFLOWS
        reason = not_finite(self.request.config, self._losses, [] if overflows else self._norms)
        if reason is not None:
            finite = tuple(value if math.isfinite(value) else None for value in self._losses)
            self._finish(Diverged(reason=reason, losses=finite))

    @property
    def is_overflowing(self) -> bool:
        """Whether the latest gradient that was told is not finite, as while loss scaling looks for its scale."""
        scaled = self.request.config["precision"] == "fp16-mixed"
        return scaled and bool(self._norms) and not math.isfinite(self._norms[-1])

    def enter(self, phase: str) -> None:
        """A phase begins between steps: `leave` ends it."""
        self._events.enter(phase)
        self._phase.enter_context(self._meter.phase(phase))

    def leave(self) -> None:
        """The phase has ended. Its memory is judged as a step's."""
        self._guarded(self._phase.close)
        self._reading()
        self._events.enter("step")

    def has_seconds(self, seconds: float) -> bool:
        """Whether the trial may still take so many."""
        limit = self.request.limit_seconds(earned=self._pace.earned)
        return time.monotonic() - self._asked_at + seconds < limit

    def conclude(self) -> None:
        """Training has ended by itself: end the trial, if enough steps are timed."""
        if self._seconds and len(self._seconds) >= least_repeats(self._seconds[-1]):
            self._end_timing(stopped_early=False)
            self.succeed()

    def _enforced(self, held_bytes: int | None) -> Meter:
        from autofit.trial.measure.meter import meter_for  # torch with it, which the program has by now

        meter = meter_for(self.request.job.hardware.kind, held_bytes, whole=True)
        self._check(meter.reading())
        self._refused = meter.refusals()
        meter.enforce(self.request.memory_limit_bytes)
        return meter

    def _take(self, seconds: float, in_use: int) -> None:
        """Judge a step by what it took, and end the trial if enough is known."""
        if self._timing_since is None:
            self._warm_up(seconds)
            return
        self._seconds.append(seconds)
        self._in_use.append(in_use)
        self._events.send(Event(step_seconds=seconds))
        elapsed = time.monotonic() - self._timing_since
        enough = len(self._seconds) >= least_repeats(seconds)
        settled = is_settled(self._seconds, elapsed_seconds=elapsed, timing_seconds=self.request.timing_seconds)
        hopeless = len(self._seconds) == 2 and self.request.is_beaten(self._reading().device_bytes, min(self._seconds))
        if hopeless or (enough and settled) or len(self._seconds) == MOST_REPEATS:
            self._end_timing(stopped_early=hopeless)
            if hopeless or not self._goes_on:
                self.succeed()

    def _end_timing(self, *, stopped_early: bool) -> None:
        if not self.is_timed:
            self.is_timed, self._stopped_early = True, stopped_early
            self._events.send(Event(timing=False))
            self._step_peak = self._reading().peak_allocated_bytes

    def succeed(self) -> NoReturn:
        """End the trial, in which steps are timed, with what it has measured."""
        self._guarded(self._phase.close)
        self._finish(Fits(measurement=self._guarded(self._measurement)))

    def _warm_up(self, seconds: float) -> None:
        """Judge a step that is not timed; not the first, in which a program does what it does once, such as compiling,
        evaluating first, or starting to load data."""
        if self._read_steps == 1:
            return
        number, elapsed = self._read_steps, time.monotonic() - self._asked_at
        left = max(0, warm_ups(seconds) - number) + least_repeats(seconds)
        try:
            event = self._pace.judge(number, seconds, elapsed_seconds=elapsed, micro_steps_left=left)
        except TooSlow as error:
            self._finish(error.outcome(after_seconds=elapsed, phase="step"))
        self._events.send(event)
        if number >= warm_ups(seconds):
            self._events.send(Event(peak_bytes=self._reading().peak_allocated_bytes))
            self._timing_since, self._setup_seconds = time.monotonic(), elapsed
            self._events.send(Event(timing=True))

    def _reading(self) -> MemoryReading:
        reading: MemoryReading = self._guarded(self._meter.reading)
        self._check(reading)
        if self._meter.refusals() > self._refused:
            reason = "the device refused memory, and the program went on without: it trains something smaller or less"
            self._finish(OutOfMemory(reason=reason, phase=self._events.phase))
        return reading

    def _check(self, reading: MemoryReading) -> None:
        """End the trial if memory has exceeded the limit before that was enforced."""
        limit = self.request.memory_limit_bytes
        if reading.device_bytes > limit:
            reason = f"the program has taken {format_bytes(reading.device_bytes)} of {format_bytes(limit)}"
            self._finish(OutOfMemory(reason=reason, phase=self._events.phase))

    def _measurement(self) -> Measurement:
        memory = self._reading()
        between_steps = {phase: peak for phase, peak in memory.phase_peaks.items() if phase not in PHASES}
        return measured(
            self.request.job,
            self.request.config,
            self._meter,
            memory,
            seconds=self._seconds,
            in_use=self._in_use,
            phase_peaks={"step": self._step_peak, **between_steps},
            losses=self._losses,
            gradient_norms=self._norms,
            setup_seconds=self._setup_seconds,
            overhead_seconds=self._started_at - self._asked_at,
            stopped_early=self._stopped_early,
        )

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """What `work` returns; a failure of memory in it is the trial's outcome."""
        try:
            return work()
        except Exception as error:
            on_cpu = self.request.job.hardware.kind == "cpu"
            failure = memory_failure(error, self._events.phase, host_is_device=on_cpu)
            if failure is None:
                raise
            self._finish(failure)

    def _finish(self, outcome: Outcome) -> NoReturn:
        """Report how the trial has ended, and wait to be ended: nothing that the program would still do is wanted."""
        self._events.send(Event(result=outcome))
        while self._socket.recv(1):
            pass
        raise SystemExit(0)  # whoever ran the trial has gone
