"""Measures a run that is no trial, from inside of the process that trains: nothing limits, judges or ends it."""

from __future__ import annotations

import os
import time
from array import array

from autofit.core.errors import AutofitError
from autofit.core.lattice import Config
from autofit.core.outcome import Fits
from autofit.techniques import Job
from autofit.trial.attempt import Attempt
from autofit.trial.machine.watch import DeviceWatch
from autofit.trial.measure.figures import MOST_REPEATS, measured
from autofit.trial.measure.meter import meter_for
from autofit.trial.measure.pace import WARM_UPS, least_repeats
from autofit.trial.program.step_clock import StepClock

LOOK_SECONDS = 5.0
"""How often the device is looked at: one look takes milliseconds, which the run would otherwise train in."""
TOLERATED = 0.01
"""By how much the tokens of a step may differ from the workload's, relative to these: rows that are filled with several
sequences have some room left."""


class NotRecorded(AutofitError):
    """A run cannot be stored; the message says why."""


class RunObserver:
    """One run on one device. Used from one thread."""

    def __init__(self, job: Job, config: Config, held_bytes: int | None) -> None:
        """Training begins now, and so does its memory. `held_bytes`: what others held of the device before this process
        used it, None where that is not known."""
        self._job, self._config = job, config
        self._meter = meter_for(job.hardware.kind, held_bytes, whole=True)
        self._meter.reset()
        # What else runs in the same terminal counts as the run's own: its workers cannot be told from that.
        self._watch = DeviceWatch(job.hardware, os.getpid(), held_bytes, session=os.getsid(0))
        self._looked = self._began = time.monotonic()
        self._setup_seconds = 0.0
        self._steps = 0
        self._left_out: set[int] = set()
        """The numbers of steps that are not timed, of those that are still to be counted."""
        self._pending: tuple[int, float, int, int] | None = None
        """The last finished step: its number, seconds, tokens and bytes in use. What follows may leave it out."""
        self._seconds = array("d")
        self._in_use: list[int] = []
        self._tokens = 0
        """What the timed steps held."""
        self._clock: StepClock[tuple[int, int, int]] = StepClock(self._meter)
        self._clock.begin()

    def step(self, tokens: int) -> None:
        """An optimizer step was issued, on batches of so many tokens."""
        self._steps += 1
        in_use = self._meter.in_use() if len(self._in_use) < MOST_REPEATS else 0
        for seconds, (number, held, bytes_then) in self._clock.end_step((self._steps, tokens, in_use)):
            self._count()
            self._pending = None if seconds is None else (number, seconds, held, bytes_then)
        now = time.monotonic()
        if self._steps == WARM_UPS:
            self._setup_seconds = now - self._began
            self._watch.follow(True)
        elif self._steps > WARM_UPS and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._watch.follow(True)

    def interrupt(self) -> None:
        """What has followed the last step, such as an evaluation, is no part of the next one: that is not timed."""
        self._left_out.add(self._steps + 1)

    def end_epoch(self) -> None:
        """The last step may have been on what was left of the data, and loading begins anew."""
        self._left_out |= {self._steps, self._steps + 1}

    def conclude(self) -> Attempt:
        """Training has ended. Raises `NotRecorded`."""
        self._count()
        self._watch.end()
        if not self._seconds or len(self._seconds) < least_repeats(self._seconds[-1]):
            raise NotRecorded(f"it is too short: {len(self._seconds)} steps could be timed")
        self._check_full()
        memory = self._meter.reading()
        measurement = measured(
            self._job,
            self._config,
            self._meter,
            memory,
            seconds=self._seconds,
            in_use=self._in_use,
            phase_peaks={"run": memory.peak_allocated_bytes},  # its evaluations and checkpoints, too
            setup_seconds=self._setup_seconds,
        )
        return Attempt(
            outcome=Fits(measurement=measurement),
            seconds=time.monotonic() - self._began,
            device_state=self._watch.state(),
        )

    def _check_full(self) -> None:
        """Raise `NotRecorded` unless the timed steps held what the workload says."""
        workload, mean = self._job.workload, self._tokens / len(self._seconds)
        if abs(mean / workload.tokens_per_step - 1.0) > TOLERATED:
            raise NotRecorded(
                f"its steps were on {mean:,.0f} tokens in the mean, and {workload.tokens_per_step:,} are "
                f"{workload.global_batch} full sequences of {workload.seq_len:,}"
            )

    def _count(self) -> None:
        """Count the last finished step, unless it is left out."""
        if self._pending is None:
            return
        number, seconds, tokens, in_use = self._pending
        self._pending = None
        if number <= WARM_UPS or number in self._left_out:
            self._left_out.discard(number)
            return
        self._seconds.append(seconds)
        self._tokens += tokens
        if len(self._in_use) < MOST_REPEATS:
            self._in_use.append(in_use)
