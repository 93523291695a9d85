"""What a trial may gain over the best so far, and how much a search may have missed, which it states when it stops."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autofit.core.frontier import Point
from autofit.core.normal import mean_above, normal_tail
from autofit.core.repeatability import INTERVAL_DEVIATIONS
from autofit.search.acquisition.step_times import Mixture
from autofit.search.acquisition.surrogate import TIME, Array

Claim = tuple[float, Array | float]
"""A chance, and the logarithms of the seconds that steps take at least if it comes true."""
NORMAL_DRAWS = np.array([-1.75, -1.15, -0.76, -0.45, -0.15, 0.15, 0.45, 0.76, 1.15, 1.75])
"""Midpoints of ten equally likely parts of the standard normal distribution: expectations are averages over these."""
CONFIDENCE = 0.95
"""The confidence with which a bound is stated."""
LEAST_DEVIATION = 1e-6
"""Of a speed's logarithm: below this, a trial is exact, as on a device that keeps perfect time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """The undominated points of one method, in order of memory; at least one."""

    memory: Array
    """Bytes, rising."""
    seconds: Array
    """Per step, falling."""

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Front:
        """From points in any order: bytes, and seconds per step."""
        ordered = np.array(sorted(points))
        fastest = np.minimum.accumulate(ordered[:, 1])
        kept = np.diff(fastest, prepend=math.inf) < 0.0
        return cls(memory=ordered[kept, 0], seconds=fastest[kept])

    @property
    def best_seconds(self) -> float:
        return float(self.seconds[-1])


def expected_gain(
    front: Front, time: Mixture, least: Array, memory: Array, limit: float, *, area_weight: float
) -> Array:
    """Expected gain of each config in the best speed, plus `area_weight` times that in the frontier's area, if it fits;
    relative.

    `time`: the logarithms of their step times, which are no less than `least`; `memory`: their bytes; `limit`: the
    memory limit in bytes.
    """
    gain, steps = np.zeros(len(memory)), _steps(front, memory, limit)
    for draw in NORMAL_DRAWS:
        worth = _worth(math.log(front.best_seconds) - np.maximum(time.mean + draw * time.deviation, least))
        faster = np.maximum(0.0, worth - 1.0)
        gain += time.weights @ (faster + area_weight * _area(steps, worth))
    return gain / len(NORMAL_DRAWS)


def _worth(lead: Array) -> Array:
    """What a speed is worth, 1 for the best so far, given its logarithm relative to that: the ratio where it is slower
    and, where it is faster, 1 plus the logarithm, so that a remote chance of a hundredfold does not outweigh all."""
    return np.where(lead > 0.0, 1.0 + lead, np.exp(np.minimum(lead, 0.0)))


def _steps(front: Front, memory: Array, limit: float) -> list[tuple[float, Array]]:
    """The steps of the frontier that any config covers: the height of each, and how much of its width each config
    covers."""
    starts = np.append(0.0, front.memory / limit)
    heights = np.append(0.0, front.best_seconds / front.seconds)
    ends = np.append(starts[1:], 1.0)
    widths = np.maximum(0.0, ends[:, None] - np.maximum(starts[:, None], memory / limit))
    return [(height, width) for height, width in zip(heights.tolist(), widths, strict=True) if width.any()]


def _area(steps: list[tuple[float, Array]], speedup: Array) -> Array:
    area = np.zeros_like(speedup)
    for height, width in steps:
        area += np.maximum(0.0, speedup - height) * width
    return area


def gain_over(winner: Point, rival: Point, *, is_faster: bool = False) -> float:
    """Expected gain in speed over `winner` if the rival's true speed, of which its trial gives a distribution, were
    known: nothing where it is slower; relative. `is_faster`: it is known to be no slower, whatever its trial showed."""
    lead = math.log(winner.measurement.step_seconds.median / rival.measurement.step_seconds.median)
    if is_faster:
        return math.expm1(mean_above(0.0, lead, max(timing_deviation(rival), LEAST_DEVIATION)))
    speedups = np.exp(lead + timing_deviation(rival) * NORMAL_DRAWS)
    return float(np.maximum(0.0, speedups - 1.0).mean())


def timing_deviation(measured: Point) -> float:
    """Standard deviation of the logarithm of a measured step time, including variation between executions."""
    spread = measured.relative_spread
    deviation = TIME.noise if spread is None else spread / INTERVAL_DEVIATIONS
    # Two steps that agree by chance must not pass for certainty. Single steps scatter by 2 % in the median trial of the
    # recorded tables and by 12 % in some, executions by 1 to 10 % (`budget.TIMING_SECONDS`).
    return max(deviation, 0.08) if measured.measurement.stopped_early else deviation


def regret_bound(
    winner: Point, rivals: Mixture, probability: Array, claims: Sequence[Claim] = ((1.0, -math.inf),)
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
