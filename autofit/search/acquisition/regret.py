"""How much faster than the winner the best config may still be, which a search states when it stops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autofit.core.frontier import Point
from autofit.core.normal import normal_tail
from autofit.core.repeatability import INTERVAL_DEVIATIONS
from autofit.search.acquisition.step_times import Mixture
from autofit.search.acquisition.surrogate import TIME

Array = NDArray[np.float64]
Claim = tuple[float, Array | float]
"""A chance, and the logarithms of the seconds that steps take at least if it comes true."""

CONFIDENCE = 0.95
"""The confidence with which a bound is stated."""
LEAST_DEVIATION = 1e-6
"""Of a speed's logarithm: below this, a trial is exact, as on a device that keeps perfect time."""


def timing_deviation(measured: Point) -> float:
    """Standard deviation of the logarithm of a measured step time, including variation between executions."""
    spread = measured.relative_spread
    deviation = TIME.noise if spread is None else spread / INTERVAL_DEVIATIONS
    # Two steps that agree by chance must not pass for certainty. Single steps scatter by 2 % in the median trial of the
    # recorded tables and by 12 % in some, executions by 4 to 7 % (`budget.TIMING_SECONDS`).
    return max(deviation, 0.08) if measured.measurement.stopped_early else deviation


def regret_bound(
    winner: Point,
    rivals: Mixture,
    probability: Array,
    claims: Sequence[Claim] = ((1.0, -math.inf),),
) -> float:
    """Upper bound on how much slower the winner is than the best of its rivals, as a share of the best speed.

    `rivals`: the logarithms of their step times, seconds; `probability`: that each fits, one entry per rival; `claims`:
    what is claimed of their step times, with chances that add up to 1. Under one hypothesis about the measurements, the
    chance that any rival exceeds a bound is at most the sum of their individual chances (Boole's inequality, which
    holds however they depend on each other), and at most 1; over all hypotheses and claims it is the mean of these.
    This is the least bound at which it is at most 1 - `CONFIDENCE`.
    """
    log_time, deviation = math.log(winner.measurement.step_seconds.median), timing_deviation(winner)
    lead, spread = log_time - rivals.mean, np.maximum(np.hypot(rivals.deviation, deviation), LEAST_DEVIATION)
    claimed = [(weight, np.broadcast_to(log_time - least, rivals.mean.shape[1:])) for weight, least in claims if weight]

    def chance(gain: float) -> float:
        return math.fsum(weight * chance_if(gain, gain < most) for weight, most in claimed)

    def chance_if(gain: float, possible: NDArray[np.bool_]) -> float:
        shares = normal_share_below((lead[:, possible] - gain) / spread[:, possible])
        return float(rivals.weights @ np.minimum(shares @ probability[possible], 1.0))

    if lead.shape[1] == 0 or chance(0.0) <= 1.0 - CONFIDENCE:
        return 0.0
    low, high = 0.0, float(np.max(np.maximum(lead, 0.0) + 40.0 * spread))
    for _ in range(30):  # bisections: to a billionth of where it began
        middle = (low + high) / 2
        low, high = (low, middle) if chance(middle) <= 1.0 - CONFIDENCE else (middle, high)
    return 1.0 - math.exp(-high)


_NODES = np.linspace(-8.0, 8.0, 1601)
_SHARES = np.array([normal_tail(-node) for node in _NODES])


def normal_share_below(deviations: Array) -> Array:
    """The probability that a normal variable is less than so many standard deviations above its mean, to within 1e-5:
    NumPy has no error function, and one hypothesis about a lattice has thousands of configs."""
    return np.asarray(np.interp(deviations, _NODES, _SHARES))
