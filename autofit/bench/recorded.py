"""The ground truth of a problem, which only the oracle and the judge see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autofit.bench.problem import Problem
from autofit.core.frontier import Point, pareto, point
from autofit.core.lattice import Config
from autofit.core.outcome import Fits, Measurement, Outcome, OutOfMemory, Trial
from autofit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The outcomes of a problem's configs under its limit."""

    problem: Problem
    trials: Mapping[Config, Trial]
    digest: str = ""
    """Of the table's file."""

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """The configs that fit. Where there is none, what follows does not exist."""
        return tuple(p for p in map(point, self.trials.values()) if p is not None)

    @cached_property
    def best(self) -> Point:
        """What is looked for: the fastest config that fits, of the most faithful method of which something does."""
        fitting = {p.method for p in self.points}
        return self.best_of(next(method for method in self.problem.methods if method in fitting))

    def best_of(self, method: str) -> Point:
        """The fastest config that fits, of a method of which something does."""
        return max((p for p in self.points if p.method == method), key=lambda p: p.measurement.tokens_per_second)

    @cached_property
    def frontier(self) -> tuple[Point, ...]:
        """The points that no other dominates, sorted by memory."""
        return pareto(self.points)

    @cached_property
    def reference_bytes(self) -> float:
        """The memory of the hypervolume's reference point, which every point beats; its speed is 0. A limit far above
        every config would make all frontiers look alike: then it is 1.1 times the heaviest's memory."""
        heaviest = max(p.measurement.device_bytes for p in self.points)
        return min(float(self.problem.memory_limit_bytes), 1.1 * heaviest)

    @cached_property
    def _area(self) -> float:
        return self._dominated(p.measurement for p in self.frontier)

    def share_of_frontier(self, trials: Iterable[Trial]) -> float:
        """Share of the exhaustive frontier's hypervolume that those cover that fit; 0 if none does. Where the frontier
        has no area, 1 if any does."""
        fitted = [trial.measurement for trial in trials if trial.measurement is not None]
        return self._dominated(fitted) / self._area if self._area else float(bool(fitted))

    def _dominated(self, fitted: Iterable[Measurement]) -> float:
        return hypervolume(((m.device_bytes, m.tokens_per_second) for m in fitted), self.reference_bytes)

    @property
    def out_of_memory(self) -> int:
        return sum(isinstance(trial.outcome, OutOfMemory) for trial in self.trials.values())

    def under(self, limit: int) -> Recorded:
        """The same under a memory limit no higher than its own, in bytes: what it does not hold is out of memory. The
        seconds stay: a real trial would have failed somewhat earlier."""
        lowered = {
            config: replace(trial, outcome=under(limit, trial.outcome), memory_limit_bytes=limit)
            for config, trial in self.trials.items()
        }
        return replace(self, problem=replace(self.problem, memory_limit_bytes=limit), trials=lowered)


def share_of_speed(trial: Trial, best: Point) -> float:
    """How fast a trial of the best one's method is, as a share of the best speed; 0 for one that did not train, and for
    one of another method."""
    if not isinstance(trial.outcome, Fits) or trial.config.text("method") != best.method:
        return 0.0
    return trial.outcome.measurement.tokens_per_second / best.measurement.tokens_per_second


def under(limit: int, outcome: Outcome) -> Outcome:
    """The outcome that a trial would have had under a limit no higher than the one it ran under."""
    if isinstance(outcome, Fits) and outcome.measurement.device_bytes > limit:
        needed = format_bytes(outcome.measurement.device_bytes)
        return OutOfMemory(reason=f"took {needed} when it was recorded, and the limit is {format_bytes(limit)}")
    return outcome


def hypervolume(points: Iterable[tuple[float, float]], most: float) -> float:
    """The area of all (bytes, tokens per second) that some point dominates, below `most` bytes: less memory and more
    speed are better. Exact; O(n log n).

    In two dimensions it is the area under a staircase (Zitzler and Thiele 1998): in order of memory, each point that is
    faster than all lighter ones adds a strip from its memory to the reference's.
    """
    area, height = 0.0, 0.0
    for memory, speed in sorted(points):
        if memory < most and speed > height:
            area += (most - memory) * (speed - height)
            height = speed
    return area
