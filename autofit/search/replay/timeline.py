"""When the parts of a recorded trial ran: for devices on which the same steps take longer, and trials that are cut."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autofit.outcome import Fits, Measurement, Trial
from autofit.trial.pace import least_repeats, micro_steps_run, warm_ups


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A trial that fits, in parts: what comes before its steps, then warm-up steps and timed repeats, all alike."""

    before_seconds: float
    """Start, build, reference loss, and whatever else was recorded beyond the steps. No device is made slower in it."""
    micro_step_seconds: float
    """An optimizer step's seconds by its micro-steps: each has an equal share of the update."""
    micro_steps: int
    """Of each step that ran."""
    accumulation: int
    """Micro-steps of a step of the whole global batch."""
    warm_ups: int
    """Steps before the first timed one."""
    repeats: int
    """Timed steps."""

    @classmethod
    def of(cls, trial: Trial) -> Timeline:
        """Of a trial that fits.

        Its steps take what was measured of them, step_seconds.median * micro_steps / accumulation each, those of the
        warm-up and `steps` that were timed; the rest of its seconds came before. Where a busy moment made its median
        longer than that leaves room for, all of its seconds were steps.
        """
        assert isinstance(trial.outcome, Fits)
        measured = trial.outcome.measurement
        accumulation = trial.workload.batch_per_device // trial.config.number("micro_batch")
        micro_steps = micro_steps_run(accumulation, trial.config)
        before = warm_ups(measured.step_seconds.median * micro_steps / accumulation)
        ran = micro_steps * (before + measured.steps)
        micro_step = min(measured.step_seconds.median / accumulation, trial.seconds / ran)
        return cls(
            before_seconds=max(0.0, trial.seconds - ran * micro_step),
            micro_step_seconds=micro_step,
            micro_steps=micro_steps,
            accumulation=accumulation,
            warm_ups=before,
            repeats=measured.steps,
        )

    @property
    def step_seconds(self) -> float:
        """Of one step as the trial ran it."""
        return self.micro_steps * self.micro_step_seconds

    @property
    def seconds(self) -> float:
        """Of the whole trial."""
        return self.before_seconds + (self.warm_ups + self.repeats) * self.step_seconds

    def slower(self, factor: float, timing_seconds: float) -> Timeline:
        """With steps that take `factor` times as long. Of the repeats are left as many as `timing_seconds` have room
        for, but `pace.least_repeats`; a faster device makes no more of them."""
        step = factor * self.step_seconds
        repeats = max(min(least_repeats(step), self.repeats), min(self.repeats, int(timing_seconds / step)))
        micro_step = factor * self.micro_step_seconds
        return replace(self, micro_step_seconds=micro_step, warm_ups=warm_ups(step), repeats=repeats)


def slower(trial: Trial, factor: float, timing_seconds: float) -> Trial:
    """The trial on a device on which its steps take `factor` times as long; unchanged unless it fits.

    The seconds of a trial that ran out of memory stay: where in its steps it did is not known.
    """
    if factor == 1.0 or not isinstance(trial.outcome, Fits):
        return trial
    measured, recorded = trial.outcome.measurement, Timeline.of(trial)
    made = recorded.slower(factor, timing_seconds)
    warm_up = made.warm_ups * made.step_seconds - recorded.warm_ups * recorded.step_seconds
    steps = measured.step_seconds
    return replace(
        trial,
        seconds=made.seconds,
        outcome=Fits(
            measurement=replace(
                measured,
                tokens_per_second=measured.tokens_per_second / factor,
                step_seconds=replace(steps, median=factor * steps.median, p95=factor * steps.p95),
                mfu=None if measured.mfu is None else measured.mfu / factor,
                steps=made.repeats,
                losses=measured.losses[: made.warm_ups + made.repeats],
                gradient_norms=measured.gradient_norms[: made.warm_ups + made.repeats],
                setup_seconds=max(measured.setup_seconds + warm_up, 0.0),
            )
        ),
    )


def heavier(trial: Trial, factor: float) -> Trial:
    """The trial on a device on which it takes `factor` times the memory; unchanged unless it fits."""
    if factor == 1.0 or not isinstance(trial.outcome, Fits):
        return trial
    return replace(trial, outcome=Fits(measurement=_with_memory(trial.outcome.measurement, factor)))


def _with_memory(measured: Measurement, factor: float) -> Measurement:
    def times(size: int) -> int:
        return round(factor * size)

    return replace(
        measured,
        peak_allocated_bytes=times(measured.peak_allocated_bytes),
        peak_reserved_bytes=times(measured.peak_reserved_bytes),
        device_bytes=times(measured.device_bytes),
        phase_peaks={phase: times(size) for phase, size in measured.phase_peaks.items()},
    )
