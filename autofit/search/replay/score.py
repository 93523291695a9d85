"""How good a method was on a problem, over its seeds, judged by its traces."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autofit.frontier import Point
from autofit.outcome import OutOfMemory
from autofit.search.replay.frontier_share import FrontierShare
from autofit.search.replay.recorded import Recorded, share_of_speed
from autofit.search.replay.trace import Run, Trace

WITHIN = (0.05, 0.02, 0.01)
"""Relative distances from the best speed: the score says when a search came this close."""
AFTER = (5, 10, 20, 40)
"""Trials after which the frontier is judged."""
MOST = 0.9
"""Share of the seeds that the second figure of each pair covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure over the seeds. None where it is infinite: half, or nine tenths, of the seeds never got there."""

    median: float | None
    p90: float | None
    """By nearest rank: at least nine tenths of the seeds are no worse."""

    @classmethod
    def of(cls, figures: Sequence[float], *, more_is_better: bool = False) -> Spread:
        """From at least one figure; infinity stands for never."""
        worst_last = sorted(figures, reverse=more_is_better)
        p90 = worst_last[math.ceil(MOST * len(worst_last)) - 1]
        return cls(median=_finite(statistics.median(worst_last)), p90=_finite(p90))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """When the best config that had run was first this close to the problem's best."""

    within: float
    seeds: int
    """Number of seeds that came this close at all."""
    trials: Spread
    seconds: Spread
    """Seconds of trials, as recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The searches that the method itself ended."""

    seeds: int
    trials: Spread
    seconds: Spread
    out_of_memory: Spread
    regret: Spread
    """By what share the best config that had run was slower than the problem's best; None where nothing of its training
    method had fitted."""
    recommended: Spread | None
    """The same of the config that they recommended, which noise may have chosen over a faster one; None for a method
    that recommends none."""
    stated: Spread | None
    """The bound on the recommended config's regret that the searches stated; None for a method that states none."""
    within_stated: int | None
    """Number of searches whose recommended config was no slower than they stated, which is of its own training
    method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How good a method was on a problem."""

    seeds: int
    reached: tuple[Reached, ...]
    """For each of `WITHIN`."""
    out_of_memory: Spread
    """Trials that ran out before the best was within the last of `WITHIN`; all, for a search that never got there."""
    hypervolume: tuple[tuple[int, Spread], ...]
    """For each of `AFTER`: share of the exhaustive frontier's hypervolume; p90: nine tenths have at least that. A
    search that ended earlier keeps what it had."""
    ended: Ended | None
    """None where the method itself ended no search."""
    asks: Spread
    repeats: Spread
    outside: Spread
    """All asks, and among them those for configs that had already run and for configs that the table lacks."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "seeds": self.seeds,
            "reached": [asdict(reached) for reached in self.reached],
            "out_of_memory": asdict(self.out_of_memory),
            "hypervolume": [{"trials": trials, **asdict(share)} for trials, share in self.hypervolume],
            "ended": None if self.ended is None else asdict(self.ended),
            "asks": asdict(self.asks),
            "repeats": asdict(self.repeats),
            "outside": asdict(self.outside),
        }


def score(recorded: Recorded, traces: Sequence[Trace]) -> Score:
    """The score of at least one search, one trace per seed."""
    ended = [trace for trace in traces if trace.stopped]
    best = recorded.best
    return Score(
        seeds=len(traces),
        reached=tuple(_reached(traces, best, within) for within in WITHIN),
        out_of_memory=_over(traces, lambda t: _ran_out(t.runs[: trials_to(t, best, WITHIN[-1])])),
        hypervolume=tuple((n, _shares(recorded, traces, n)) for n in AFTER),
        ended=_ended(recorded, ended) if ended else None,
        asks=_over(traces, lambda t: t.asks),
        repeats=_over(traces, lambda t: t.repeats),
        outside=_over(traces, lambda t: t.outside),
    )


def trials_to(trace: Trace, best: Point, within: float) -> int | None:
    """After how many trials one had run that is slower than the best by at most the share `within`; None for never."""
    near = (n for n, run in enumerate(trace.runs, start=1) if _speed(run, best) >= 1.0 - within)
    return next(near, None)


def regret(trace: Trace, best: Point) -> float:
    """By what share the fastest config that fitted is slower than the best; infinite where nothing of its method has
    fitted."""
    return _regret(trace.runs, best)


def _regret(runs: Iterable[Run], best: Point) -> float:
    fastest = max((_speed(run, best) for run in runs), default=0.0)
    return 1.0 - fastest if fastest else math.inf


def _runs_of_recommended(trace: Trace) -> list[Run]:
    return [run for run in trace.runs if trace.stated is not None and run.config == trace.stated.config]


def _within_stated(trace: Trace, recorded: Recorded) -> bool:
    """Whether the recommended config is no slower than stated, which is of the best of the same training method."""
    assert trace.stated is not None
    best = recorded.best_of(trace.stated.config.text("method"))
    return _regret(_runs_of_recommended(trace), best) <= trace.stated.regret_bound


def share_after(recorded: Recorded, trace: Trace, trials: int) -> float:
    """Share of the exhaustive frontier's hypervolume that the first `trials` trials cover."""
    return FrontierShare(recorded).of(trace.runs[:trials])


def _reached(traces: Sequence[Trace], best: Point, within: float) -> Reached:
    numbers = [trials_to(trace, best, within) for trace in traces]
    costs = [_seconds(t.runs[:n]) if n is not None else math.inf for t, n in zip(traces, numbers, strict=True)]
    return Reached(
        within=within,
        seeds=sum(number is not None for number in numbers),
        trials=Spread.of([math.inf if number is None else number for number in numbers]),
        seconds=Spread.of(costs),
    )


def _ended(recorded: Recorded, traces: Sequence[Trace]) -> Ended:
    best = recorded.best
    stating = [trace for trace in traces if trace.stated]
    return Ended(
        seeds=len(traces),
        trials=_over(traces, lambda t: len(t.runs)),
        seconds=_over(traces, lambda t: _seconds(t.runs)),
        out_of_memory=_over(traces, lambda t: _ran_out(t.runs)),
        regret=_over(traces, lambda t: regret(t, best)),
        recommended=_over(stating, lambda t: _regret(_runs_of_recommended(t), best)) if stating else None,
        stated=Spread.of([t.stated.regret_bound for t in stating if t.stated]) if stating else None,
        within_stated=sum(_within_stated(t, recorded) for t in stating) if stating else None,
    )


def _shares(recorded: Recorded, traces: Sequence[Trace], trials: int) -> Spread:
    return Spread.of([share_after(recorded, trace, trials) for trace in traces], more_is_better=True)


def _over(traces: Sequence[Trace], figure: Callable[[Trace], float]) -> Spread:
    return Spread.of([figure(trace) for trace in traces])


def _ran_out(runs: Iterable[Run]) -> int:
    return sum(isinstance(run.outcome, OutOfMemory) for run in runs)


def _seconds(runs: Iterable[Run]) -> float:
    return math.fsum(run.seconds for run in runs)


def _speed(run: Run, best: Point) -> float:
    return share_of_speed(run.config, run.outcome, best)


def _finite(figure: float) -> float | None:
    return figure if math.isfinite(figure) else None
