"""The ground truth of a problem, which only the oracle and the judge see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autofit.frontier import Point, pareto, point
from autofit.lattice import Config
from autofit.outcome import Fits, Outcome, OutOfMemory, Trial
from autofit.search.replay.problem import Problem
from autofit.units import format_bytes

BEYOND_HEAVIEST = 1.1
"""Multiple of the heaviest fitting config's memory at which the hypervolume ends, unless the limit is below that. A
limit far above every config would make all frontiers look alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The outcomes of a problem's configs under its limit. At least one of them fits."""

    problem: Problem
    trials: Mapping[Config, Trial]
    """As recorded, except that a limit below the table's turns what it does not hold into out of memory. The seconds
    stay: a real trial would have failed somewhat earlier."""

    @property
    def points(self) -> tuple[Point, ...]:
        """The configs that fit."""
        return tuple(p for p in map(point, self.trials.values()) if p is not None)

    @property
    def best(self) -> Point:
        """What is looked for: the fastest config that fits, of the most faithful method of which something does."""
        fitting = {p.method for p in self.points}
        return self.best_of(next(method for method in self.problem.methods if method in fitting))

    def best_of(self, method: str) -> Point:
        """The fastest config that fits, of a method of which something does."""
        return max((p for p in self.points if p.method == method), key=lambda p: p.measurement.tokens_per_second)

    @property
    def frontier(self) -> tuple[Point, ...]:
        """The points that no other dominates, sorted by memory."""
        return pareto(self.points)

    @property
    def reference(self) -> tuple[float, float]:
        """The hypervolume's reference point, which every point beats: bytes and tokens per second."""
        heaviest = max(p.measurement.device_bytes for p in self.points)
        return min(float(self.problem.memory_limit_bytes), BEYOND_HEAVIEST * heaviest), 0.0

    @property
    def out_of_memory(self) -> int:
        """How many configs do not fit."""
        return sum(isinstance(trial.outcome, OutOfMemory) for trial in self.trials.values())


def share_of_speed(config: Config, outcome: Outcome, best: Point) -> float:
    """How fast a config of the best one's method is, as a share of the best speed; 0 for one that did not train, and
    for one of another method."""
    if not isinstance(outcome, Fits) or config.text("method") != best.method:
        return 0.0
    return outcome.measurement.tokens_per_second / best.measurement.tokens_per_second


def under(limit: int, outcome: Outcome) -> Outcome:
    """The outcome that a trial would have had under a limit no higher than the one it ran under."""
    if isinstance(outcome, Fits) and outcome.measurement.device_bytes > limit:
        needed = format_bytes(outcome.measurement.device_bytes)
        return OutOfMemory(reason=f"took {needed} when it was recorded, and the limit is {format_bytes(limit)}")
    return outcome
