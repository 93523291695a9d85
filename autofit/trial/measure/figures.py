"""The measurement that timed steps make: those of autofit's own step, and those of a user's program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autofit.core.lattice import Config
from autofit.core.outcome import Measurement, RankMeasurement
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
    phase_peaks: Mapping[str, int],
    losses: Sequence[float] = (),
    gradient_norms: Sequence[float] = (),
    setup_seconds: float,
    overhead_seconds: float = 0.0,
    stopped_early: bool = False,
    host_baseline_bytes: int = 0,  # what a program imports is its own
    reference_loss: float | None = None,
    ranks: tuple[RankMeasurement, ...] = (),
) -> Measurement:
    """What timed steps show. `seconds` is what each took, `in_use` the bytes in use after each of the first of them."""
    from autofit.training.flops import mfu

    steps = step_seconds(seconds)
    speed = job.workload.tokens_per_step / steps.median
    return Measurement(
        tokens_per_second=speed,
        step_seconds=steps,
        mfu=mfu(job, config, speed),
        peak_allocated_bytes=memory.peak_allocated,
        peak_reserved_bytes=memory.peak_reserved,
        device_bytes=memory.device,
        host_peak_bytes=memory.host_peak,
        host_baseline_bytes=host_baseline_bytes,
        phase_peaks=phase_peaks,
        losses=tuple(losses),
        reference_loss=reference_loss,
        steps=len(seconds),
        setup_seconds=setup_seconds,
        overhead_seconds=overhead_seconds,
        gradient_norms=tuple(norm if math.isfinite(norm) else None for norm in gradient_norms),
        setup_peak_bytes=memory.setup_peak,
        leak_bytes_per_step=leak(in_use, meter.leak_noise_bytes),
        expandable_segments=meter.expandable_segments(),
        stopped_early=stopped_early,
        ranks=ranks,
    )
