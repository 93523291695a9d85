"""How a method approached the best config, trial by trial and second by second: what a plot of it shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from autofit.frontier import Point
from autofit.search.replay.frontier_share import FrontierShare
from autofit.search.replay.oracle import HORIZON
from autofit.search.replay.recorded import Recorded
from autofit.search.replay.score import Spread, regret
from autofit.search.replay.trace import Trace

TRIALS = tuple(range(1, HORIZON + 1))
"""Numbers of trials after which a search is sampled."""
MOMENTS = 40
"""At how many points in time, in seconds of trials, a search is sampled."""
DIGITS = 4
"""Digits of a share, and of seconds: more than a plot shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A share over the seeds, at successive places of a plot."""

    median: tuple[float, ...]
    p10: tuple[float, ...]
    """Nine tenths of the seeds have at least that, by nearest rank."""
    p90: tuple[float, ...]
    """Nine tenths of the seeds have at most that."""

    @classmethod
    def of(cls, searches: Sequence[Sequence[float]]) -> Band:
        """From at least one search, each given as its shares at all places."""
        places = list(zip(*searches, strict=True))
        low = [Spread.of(shares, more_is_better=True) for shares in places]
        high = [Spread.of(shares) for shares in places]
        return cls(
            median=_rounded(share.median for share in low),
            p10=_rounded(share.p90 for share in low),
            p90=_rounded(share.p90 for share in high),
        )

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"median": list(self.median), "p10": list(self.p10), "p90": list(self.p90)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A method's progress over the seeds of one problem. A search that has ended keeps what it had."""

    speed: Band
    """After each of `TRIALS`: the best speed found so far, as a share of the problem's best; 0 while nothing of its
    training method fits."""
    hypervolume: Band
    """After each of `TRIALS`: the share of the exhaustive frontier's hypervolume."""
    seconds: tuple[float, ...]
    """`moments` of the problem."""
    speed_by_seconds: Band
    """Like `speed`, but over the trials that have ended after each of `seconds`."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "speed": self.speed.to_json(),
            "hypervolume": self.hypervolume.to_json(),
            "seconds": list(self.seconds),
            "speed_by_seconds": self.speed_by_seconds.to_json(),
        }


def trajectory(recorded: Recorded, traces: Sequence[Trace]) -> Trajectory:
    """The trajectory of at least one search, one trace per seed."""
    best = recorded.best
    share, times = FrontierShare(recorded), moments(recorded)
    return Trajectory(
        speed=Band.of([_fastest(trace, best, TRIALS) for trace in traces]),
        hypervolume=Band.of([[share.of(trace.runs[:number]) for number in TRIALS] for trace in traces]),
        seconds=_rounded(times, significant=True),
        speed_by_seconds=Band.of([_fastest(trace, best, _ended(trace, times)) for trace in traces]),
    )


def moments(recorded: Recorded) -> list[float]:
    """The `MOMENTS` times, in seconds, at which a search of the problem is sampled, equal for all methods: from the
    cheapest trial to the sum of all, evenly spaced on a logarithmic axis."""
    seconds = [trial.seconds for trial in recorded.trials.values()]
    first, last = min(seconds), math.fsum(seconds)
    return [*(first * (last / first) ** (n / (MOMENTS - 1)) for n in range(MOMENTS - 1)), last]


def _fastest(trace: Trace, best: Point, numbers: Iterable[int]) -> list[float]:
    """The speed of the fastest among the first n runs, for each n in `numbers`, as a share of the best's."""
    begun = [replace(trace, runs=trace.runs[:number]) for number in range(len(trace.runs) + 1)]
    so_far = [max(0.0, 1.0 - regret(some, best)) for some in begun]
    return [so_far[min(number, len(trace.runs))] for number in numbers]


def _ended(trace: Trace, times: Iterable[float]) -> list[int]:
    """How many runs have ended by each time."""
    ends = list(accumulate(run.seconds for run in trace.runs))
    return [sum(end <= time for end in ends) for time in times]


def _rounded(figures: Iterable[float | None], *, significant: bool = False) -> tuple[float, ...]:
    """Rounded to `DIGITS` decimals, or significant digits. None does not occur: no share is infinite."""
    known = [0.0 if figure is None else figure for figure in figures]
    return tuple(float(f"{figure:.{DIGITS}g}") if significant else round(figure, DIGITS) for figure in known)
