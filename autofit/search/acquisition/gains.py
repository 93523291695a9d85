"""What a trial may gain: over the fastest config seen so far, and in area under the frontier."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autofit.core.frontier import Point
from autofit.core.normal import mean_above
from autofit.search.acquisition.regret import LEAST_DEVIATION, timing_deviation
from autofit.search.acquisition.step_times import Mixture

Array = NDArray[np.float64]

NORMAL_DRAWS = np.array([-1.75, -1.15, -0.76, -0.45, -0.15, 0.15, 0.45, 0.76, 1.15, 1.75])
"""Midpoints of ten equally likely parts of the standard normal distribution: expectations are averages over these."""


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
        """Seconds per step of the fastest point."""
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
