"""One search on one made device, and what it was worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autofit.bench.made_device import MadeDevice
from autofit.frontier import PRACTICAL, Point
from autofit.outcome import DEADLINE_SECONDS, OutOfMemory, TimedOut
from autofit.search.replay import ours
from autofit.search.replay.frontier_share import FrontierShare
from autofit.search.replay.oracle import Enough, Oracle
from autofit.search.replay.problem import Problem
from autofit.search.replay.recorded import Recorded, share_of_speed
from autofit.search.replay.rivals_optuna import RIVALS
from autofit.search.replay.trace import Run, Trace

OURS = "autofit"
BUDGET_SECONDS = 600.0
"""The time budget of our search: the command's default. Optuna's has none, and is ended by the oracle."""
UNDECIDED = 1.25
"""Factor by which a method may miss the share of speed that makes it practical, or exceed it, so that noise may decide
either way: both count."""
NEAR, NEAREST = 0.05, 0.01
"""Relative distances from the best speed, for the trials and seconds that it took to come there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What a search on a made device did; `trace` has its trials."""

    device: MadeDevice
    recorded: Recorded
    """The made device's own table."""
    trace: Trace

    @property
    def regret(self) -> float:
        """By what share the recommended config is slower than the best of a method to recommend, judged by what was
        recorded; 1 where it is of another method, did not train or is missing. For a method that recommends none, the
        best config that it ran counts."""
        stated = self.trace.stated
        runs = [run for run in self.trace.runs if stated is None or run.config == stated.config]
        return 1.0 - max((share for best in self.bests for share in _shares(runs, best)), default=0.0)

    @property
    def bests(self) -> tuple[Point, ...]:
        """The fastest config of each method that may be recommended here: one, unless noise may decide."""
        return practical(self.recorded)

    @property
    def bound_holds(self) -> bool | None:
        """Whether the recommended config is no slower than the search stated, which is of the best of its own training
        method; None where it stated nothing."""
        stated = self.trace.stated
        if stated is None:
            return None
        best = self.recorded.best_of(stated.config.text("method"))
        own = max(_shares([run for run in self.trace.runs if run.config == stated.config], best), default=0.0)
        return 1.0 - own <= stated.regret_bound

    def reached(self, within: float) -> tuple[int, float] | None:
        """Trials and their seconds until one was so close to the best; None for never."""
        seconds = 0.0
        for number, run in enumerate(self.trace.runs, start=1):
            seconds += paid_seconds(run)
            if any(share >= 1.0 - within for best in self.bests for share in _shares([run], best)):
                return number, seconds
        return None

    def figures(self) -> dict[str, float | int | str | bool | None]:
        """As a JSON object."""
        runs, stated = self.trace.runs, self.trace.stated
        near, nearest = self.reached(NEAR), self.reached(NEAREST)
        return {
            "regret": self.regret,
            "stated": None if stated is None else stated.regret_bound,
            "bound_holds": self.bound_holds,
            "seconds_to_near": near and near[1],
            "trials_to_best": nearest and nearest[0],
            "seconds_to_best": nearest and nearest[1],
            "frontier": FrontierShare(self.recorded).of(runs),
            "trials": len(runs),
            "seconds": math.fsum(map(paid_seconds, runs)),
            "longest_seconds": max(map(paid_seconds, runs), default=0.0),
            "out_of_memory": sum(isinstance(run.outcome, OutOfMemory) for run in runs),
            "timed_out": sum(isinstance(run.outcome, TimedOut) for run in runs),
            "ended": self.trace.stopped,
        }


def searched(
    recorded: Recorded,
    device: MadeDevice,
    search: str,
    seed: int,
    budget_seconds: float | None,
    *,
    workers: int = 1,
) -> Searched:
    """Run `OURS`, or one of Optuna's searches, on a made device, of which `recorded` is the honest table.

    Raises what the search raises: on a device, however strange, it should raise nothing.
    """
    made = device.recorded(recorded)
    oracle = device.oracle(made, seed)
    method = _ours(budget_seconds, workers) if search == OURS else RIVALS[search]
    try:
        method(made.problem, oracle, seed)
    except Enough:
        return Searched(device=device, recorded=made, trace=oracle.trace(stopped=False))
    return Searched(device=device, recorded=made, trace=oracle.trace(stopped=True))


def practical(recorded: Recorded) -> tuple[Point, ...]:
    """The fastest config of the method to recommend: the most faithful one that has at least `PRACTICAL` of the speed
    of the next that fits. Those of two methods where that is `UNDECIDED`."""
    fitting = {p.method for p in recorded.points}
    bests = [recorded.best_of(method) for method in recorded.problem.methods if method in fitting]
    found: list[Point] = []
    for best, following in zip(bests, [*bests[1:], None], strict=True):
        if following is None:
            return (*found, best)
        share = best.measurement.tokens_per_second / following.measurement.tokens_per_second / PRACTICAL
        if share >= 1.0 / UNDECIDED:
            found.append(best)
        if share >= UNDECIDED:
            break
    return tuple(found)


def paid_seconds(run: Run) -> float:
    """What a run has cost: a trial is killed at its deadline, whoever asks for it."""
    return min(run.seconds, DEADLINE_SECONDS)


def _ours(budget_seconds: float | None, workers: int) -> Callable[[Problem, Oracle, int], None]:
    def search(problem: Problem, oracle: Oracle, seed: int) -> None:
        pool = ours.ReplayPool(ours.job_of(problem), oracle, size=workers, devices=problem.workload.devices)
        ours.search_on(pool, problem, seed, budget_seconds=budget_seconds)

    return search


def _shares(runs: Sequence[Run], best: Point) -> list[float]:
    return [share_of_speed(run.config, run.outcome, best) for run in runs]
