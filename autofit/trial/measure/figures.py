"""The measurement that timed steps make: those of autofit's own step, and those of a user's program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autofit.core.lattice import Config
from autofit.core.outcome import Measurement
from autofit.techniques import Job
from autofit.trial.measure.leak import leak
from autofit.trial.measure.repeats import step_seconds

if TYPE_CHECKING:
    from autofit.trial.measure.meter import MemoryReading, Meter


def measured(
    job: Job,
    config: Config,
    meter: Meter,
    memory: MemoryReading,
    *,
    seconds: Sequence[float],
    in_use: Sequence[int],
    losses: Sequence[float] = (),
    gradient_norms: Sequence[float] = (),
    **others: Any,
) -> Measurement:
    """What timed steps show. `seconds` is what each took, `in_use` the bytes in use after each of the first of them;
    `others` are further fields of the measurement."""
    from autofit.training.flops import mfu

    steps = step_seconds(seconds)
    speed = job.workload.tokens_per_step / steps.median
    beside = {"host_baseline_bytes": 0, "overhead_seconds": 0.0, "reference_loss": None}  # as of a user's program
    return Measurement(
        tokens_per_second=speed,
        step_seconds=steps,
        mfu=mfu(job, config, speed),
        losses=tuple(losses),
        steps=len(seconds),
        gradient_norms=tuple(norm if math.isfinite(norm) else None for norm in gradient_norms),
        leak_bytes_per_step=leak(in_use, meter.leak_noise_bytes),
        expandable_segments=meter.expandable_segments(),
        **{**beside, **asdict(memory), **others},
    )
