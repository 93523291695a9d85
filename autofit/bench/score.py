"""How good a method was on a problem, over its seeds, judged by its traces."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autofit.bench.oracle import CLOSE, Trace
from autofit.bench.recorded import Recorded, share_of_speed
from autofit.core.frontier import Point
from autofit.core.outcome import OutOfMemory, Trial

AFTER = (5, 10, 20, 40)
"""Trials after which the frontier is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """A figure over the seeds. None where it is infinite: half, or nine tenths, of the seeds never got there."""

    median: float | None
    p90: float | None
    """By nearest rank: at least nine tenths of the seeds are no worse."""

    @classmethod
    def of(cls, figures: Iterable[float], *, more_is_better: bool = False) -> Quantiles:
        """From at least one figure; infinity stands for never."""
        worst_last = sorted(figures, reverse=more_is_better)
        both = statistics.median(worst_last), worst_last[math.ceil(0.9 * len(worst_last)) - 1]
        median, p90 = (figure if math.isfinite(figure) else None for figure in both)
        return cls(median=median, p90=p90)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Share of the exhaustive frontier's hypervolume after so many trials; p90: nine tenths of the seeds have at least
    that. A search that ended earlier keeps what it had."""

    trials: int
    median: float | None
    p90: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The searches that the method itself ended."""

    seeds: int
    trials: Quantiles
    seconds: Quantiles
    out_of_memory: Quantiles
    regret: Quantiles
    """By what share the best config that had run was slower than the problem's best; None where nothing of its training
    method had fitted."""
    recommended: Quantiles | None
    """The same of the config that they recommended, which noise may have chosen over a faster one; None for a method
    that recommends none."""
    stated: Quantiles | None
    """The bound on the recommended config's regret that the searches stated; None for a method that states none."""
    within_stated: int | None
    """Number of searches whose recommended config was no slower than they stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How good a method was on a problem."""

    seeds: int
    near: int
    """Number of seeds that came as near the problem's best as `CLOSE` at all."""
    trials: Quantiles
    """Until then."""
    seconds: Quantiles
    """Of these trials, as recorded."""
    out_of_memory: Quantiles
    """Of these trials, those that ran out; of all, for a search that never got there."""
    hypervolume: tuple[Share, ...]
    """For each of `AFTER`."""
    ended: Ended | None
    """None where the method itself ended no search."""


def score(recorded: Recorded, traces: Sequence[Trace]) -> Score:
    """The score of at least one search, one trace per seed."""
    ended = [trace for trace in traces if trace.stopped]
    trials_until_close = [(trace, trials_to(trace, recorded.best)) for trace in traces]
    shares = [
        Quantiles.of((recorded.share_of_frontier(t.runs[:n]) for t in traces), more_is_better=True) for n in AFTER
    ]
    return Score(
        seeds=len(traces),
        near=sum(number is not None for _, number in trials_until_close),
        trials=Quantiles.of(math.inf if n is None else n for _, n in trials_until_close),
        seconds=Quantiles.of(math.inf if n is None else _seconds(trace.runs[:n]) for trace, n in trials_until_close),
        out_of_memory=Quantiles.of(_out_of_memory(trace.runs[:n]) for trace, n in trials_until_close),
        hypervolume=tuple(Share(trials=n, median=s.median, p90=s.p90) for n, s in zip(AFTER, shares, strict=True)),
        ended=_ended(recorded, ended) if ended else None,
    )


def trials_to(trace: Trace, best: Point) -> int | None:
    """After how many trials one had run that is as near the best as `CLOSE`; None for never."""
    close = (n for n, trial in enumerate(trace.runs, start=1) if share_of_speed(trial, best) >= 1.0 - CLOSE)
    return next(close, None)


def regret(trials: Iterable[Trial], best: Point) -> float:
    """By what share the fastest config that fitted is slower than the best; infinite where nothing of its method has
    fitted."""
    fastest = max((share_of_speed(trial, best) for trial in trials), default=0.0)
    return 1.0 - fastest if fastest else math.inf


def recommended(trace: Trace) -> list[Trial]:
    """The trials of the config that the search recommended."""
    return [trial for trial in trace.runs if trace.stated is not None and trial.config == trace.stated.config]


def bound_holds(trace: Trace, recorded: Recorded) -> bool:
    """Whether the recommended config is no slower than stated, which is of the best of the same training method."""
    assert trace.stated is not None
    best = recorded.best_of(trace.stated.config.text("method"))
    return regret(recommended(trace), best) <= trace.stated.regret_bound


def _ended(recorded: Recorded, traces: Sequence[Trace]) -> Ended:
    stating = [trace for trace in traces if trace.stated]
    return Ended(
        seeds=len(traces),
        trials=Quantiles.of(len(t.runs) for t in traces),
        seconds=Quantiles.of(_seconds(t.runs) for t in traces),
        out_of_memory=Quantiles.of(_out_of_memory(t.runs) for t in traces),
        regret=Quantiles.of(regret(t.runs, recorded.best) for t in traces),
        recommended=Quantiles.of(regret(recommended(t), recorded.best) for t in stating) if stating else None,
        stated=Quantiles.of(t.stated.regret_bound for t in stating if t.stated) if stating else None,
        within_stated=sum(bound_holds(t, recorded) for t in stating) if stating else None,
    )


def _out_of_memory(trials: Iterable[Trial]) -> int:
    return sum(isinstance(trial.outcome, OutOfMemory) for trial in trials)


def _seconds(trials: Iterable[Trial]) -> float:
    return math.fsum(trial.seconds for trial in trials)
