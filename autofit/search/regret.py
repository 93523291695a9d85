"""How much faster than the winner the best config may still be, which a search states when it stops."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from autofit.frontier import Point
from autofit.repeatability import INTERVAL_DEVIATIONS
from autofit.search.surrogate import TIME, LogNormal

Array = NDArray[np.float64]

CONFIDENCE = 0.95
"""Share of searches whose regret should be within the bound that they state."""
HALVINGS = 50
"""Bisections of the interval in which the bound is sought: until only rounding is left."""


HASTY_DEVIATION = 0.08
"""The least standard deviation of the logarithm of a step time from a trial that was stopped early: two steps that
agree by chance must not pass for certainty. Single steps scatter by 2 % in the median trial of the recorded tables and
by 12 % in some, executions by 4 to 7 % (`budget.TIMING_SECONDS`)."""


def timing_deviation(measured: Point) -> float:
    """Standard deviation of the logarithm of a measured step time, including variation between executions."""
    spread = measured.relative_spread
    deviation = TIME.noise if spread is None else spread / INTERVAL_DEVIATIONS
    return max(deviation, HASTY_DEVIATION) if measured.measurement.stopped_early else deviation


def regret_bound(
    winner: Point,
    rivals: LogNormal,
    probability: Array,
    least: Array | float = -math.inf,
    confidence: float = CONFIDENCE,
) -> float:
    """Upper bound on how much slower the winner is than the best of its rivals, as a share of the best speed.

    `rivals`: the logarithms of their step times, seconds, which are no less than `least`; `probability`: that each
    fits, one entry per rival. The chance that any rival exceeds a bound is at most the sum of their individual chances
    (Boole's inequality, which holds however they depend on each other): this is the least bound at which that sum is at
    most 1 - `confidence`.
    """
    own, deviation = math.log(winner.measurement.step_seconds.median), timing_deviation(winner)
    lead, most = own - rivals.mean, np.broadcast_to(own - least, rivals.mean.shape)
    spread = np.hypot(rivals.deviation, deviation)

    def chance(gain: float) -> float:
        possible = gain < most
        beyond = ((gain - lead) / spread)[possible].tolist()
        return math.fsum(p * _share_above(d) for p, d in zip(probability[possible].tolist(), beyond, strict=True))

    if len(lead) == 0 or chance(0.0) <= 1.0 - confidence:
        return 0.0
    low, high = 0.0, float(np.max(np.maximum(lead, 0.0) + 40.0 * spread))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if chance(middle) <= 1.0 - confidence else (middle, high)
    return 1.0 - math.exp(-high)


def _share_above(deviations: float) -> float:
    """The probability that a normal variable is more than so many standard deviations above its mean."""
    return math.erfc(deviations / math.sqrt(2)) / 2
