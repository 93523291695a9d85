"""Normal variables of which one end is known to be cut off."""

from __future__ import annotations

import math
from statistics import NormalDist


def mean_above(least: float, mean: float, deviation: float) -> float:
    """The mean of a normal variable that is known to lie above `least`."""
    return moments_above(least, mean, deviation)[0]


def moments_above(least: float, mean: float, deviation: float) -> tuple[float, float]:
    """Mean and variance of a normal variable that is known to lie above `least` (Greene 2012, theorem 19.2)."""
    standard = (least - mean) / deviation
    # Farther out, the tail's own expansion is more accurate than dividing by its area.
    if standard > 8.0:
        return least + deviation / standard, (deviation / standard) ** 2
    hazard = NormalDist().pdf(standard) / normal_tail(standard)
    return mean + deviation * hazard, deviation**2 * (1.0 - hazard * (hazard - standard))


def normal_tail(deviations: float) -> float:
    """The probability that a normal variable is more than so many standard deviations above its mean. Rounding leaves
    nothing of it in `1 - NormalDist().cdf(deviations)` where it is small."""
    return math.erfc(deviations / math.sqrt(2)) / 2
