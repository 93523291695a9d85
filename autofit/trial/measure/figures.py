"""What timed steps show, of autofit's own step and of a user's program: their median and how precisely it is known, and
whether each leaves memory behind, which would end a run of thousands of steps."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autofit.core.lattice import Config
from autofit.core.outcome import Measurement, StepSeconds
from autofit.techniques import Job

if TYPE_CHECKING:
    from autofit.trial.measure.meter import MemoryReading, Meter

STUDENT_T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)
"""95 % quantile of Student's t for 1 to 15 degrees of freedom (NIST/SEMATECH e-Handbook, section 1.3.6.7.2)."""
NORMAL_95 = statistics.NormalDist().inv_cdf(0.95)
"""95 % quantile of the normal distribution, used for more degrees of freedom."""
MEDIAN_INEFFICIENCY = math.sqrt(math.pi / 2)
"""Standard error of a normal sample's median over that of its mean (Kendall and Stuart, volume 1, section 14.6)."""
MOST_REPEATS = 30
"""Most timed steps, however much they scatter."""
LEAK_STEPS = 6
"""With fewer steps, a heap that is settling looks like one that grows."""
NORMAL_DEVIATION = 1.0 / statistics.NormalDist().inv_cdf(0.75)
"""Standard deviation of a normal variable over its median absolute deviation."""


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


def relative_spread(values: Sequence[float]) -> float | None:
    """Width of the 90 % confidence interval of the median, divided by the median; None for fewer than two values.

    It assumes independent values, and leaves out what another process or another minute would add: that is learned from
    configs that ran again (`autofit.core.repeatability`).
    """
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    t = STUDENT_T_95[freedom - 1] if freedom <= len(STUDENT_T_95) else NORMAL_95
    error = MEDIAN_INEFFICIENCY * statistics.stdev(values) / math.sqrt(len(values))
    return 2 * t * error / statistics.median(values)


def step_seconds(values: Sequence[float]) -> StepSeconds:
    """Median, 95 % quantile and relative spread of a trial's timed steps."""
    import numpy

    return StepSeconds(
        median=statistics.median(values),
        p95=float(numpy.quantile(values, 0.95)),
        relative_spread=relative_spread(values),
    )


def is_settled(values: Sequence[float], *, elapsed_seconds: float, timing_seconds: float) -> bool:
    """Whether timed steps agree to 2 %, or the time for repeating them is spent."""
    spread = relative_spread(values)
    return elapsed_seconds > timing_seconds or (spread is not None and spread <= 0.02)


def may_leak(in_use: Sequence[int], noise_bytes: int, *, most: int) -> bool:
    """Whether memory has grown by more than `noise_bytes` at every step so far, in too few steps for `leak` to tell,
    and the `most` that there is time for suffice for that."""
    too_few = len(in_use) < LEAK_STEPS <= most
    return too_few and all(b - a > noise_bytes for a, b in itertools.pairwise(in_use))


def leak(in_use: Sequence[int], noise_bytes: int) -> int:
    """Bytes by which memory grows per step, from what was in use after each step since the warm-up; 0 if the growth is
    not steady, does not exceed `noise_bytes` or what scatter explains, or there are too few steps to tell.

    The slope is the median of those between all pairs of steps (Theil and Sen: P. K. Sen, JASA 63, 1968), which an
    allocator that gives memory back once does not bend. A single jump bends it, but is no growth at the median step. It
    must exceed 0 by four standard errors: on a CPU, what the heap keeps differs by tens of MiB from step to step, and
    of thousands of trials hardly one may be accused of a leak by that.
    """
    if len(in_use) < LEAK_STEPS:
        return 0
    slope = statistics.median((b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(enumerate(in_use), 2))
    typical = statistics.median(b - a for a, b in itertools.pairwise(in_use))
    least = max(noise_bytes, 4.0 * _standard_error(in_use, slope))
    return int(slope) if slope > least and typical > noise_bytes else 0


def _standard_error(in_use: Sequence[int], slope: float) -> float:
    """The standard error of a slope over equally spaced steps, from how they scatter about it: that of least squares,
    with a deviation that a few outliers do not raise."""
    count = len(in_use)
    level = [size - slope * step for step, size in enumerate(in_use)]
    middle = statistics.median(level)
    deviation = NORMAL_DEVIATION * statistics.median(abs(size - middle) for size in level)
    return deviation * math.sqrt(12 / (count * (count**2 - 1)))
