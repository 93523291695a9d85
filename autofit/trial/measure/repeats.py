"""How precisely the median of repeated timings of one step in one process is known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autofit.core.outcome import StepSeconds

STUDENT_T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)
"""95 % quantile of Student's t for 1 to 15 degrees of freedom (NIST/SEMATECH e-Handbook, section 1.3.6.7.2)."""
NORMAL_95 = statistics.NormalDist().inv_cdf(0.95)
"""95 % quantile of the normal distribution, used for more degrees of freedom."""
MEDIAN_INEFFICIENCY = math.sqrt(math.pi / 2)
"""Standard error of a normal sample's median over that of its mean (Kendall and Stuart, volume 1, section 14.6)."""
MOST_REPEATS = 30
"""Most timed steps, however much they scatter."""


def relative_spread(values: Sequence[float]) -> float | None:
    """Width of the 90 % confidence interval of the median, divided by the median; None for fewer than two values.

    It says how well this process knows its own median, assuming independent values; a few that agree by chance still
    give a wide interval. It leaves out what another process would add, and a machine that drifts from minute to minute:
    `autofit.core.repeatability` learns those from configs that ran again.
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
