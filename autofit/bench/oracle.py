"""The only source of outcomes for every search method: looks them up, counts, and records what was paid for."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from autofit.bench.problem import Problem
from autofit.bench.recorded import Recorded, share_of_speed
from autofit.core.lattice import Config
from autofit.core.outcome import Fits, Outcome, Trial
from autofit.core.repeatability import INTERVAL_DEVIATIONS

HORIZON = 40
"""Trials that every search may run, whatever it has found."""
MOST_ASKS = 3 * HORIZON
"""Asks after which a search is ended: an overconfident model asks for the same config again and again."""
CLOSE = 0.01
"""Relative distance from the table's best speed that is near it: a search that is, and has run its horizon, is
ended."""

Cut = Callable[[Trial], Trial]
"""How a trial ends where whoever asks for it does not let it run to its end."""


class Enough(BaseException):
    """The search is ended from outside. Not an `Exception`: rivals catch those, and would go on."""


class CannotRun(Exception):
    """Something that a method needs is missing here; the message says what, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What a search that has ended states about the config that it recommends."""

    config: Config
    regret_bound: float
    """Upper bound on how much slower it is than the best, as a share of the best speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One search: its trials in order, and what else it asked."""

    runs: tuple[Trial, ...]
    """What was paid for, as recorded: the method saw a fresh draw of each speed. A trial that was cut is as the method
    saw it, with the seconds until then."""
    asks: int
    """All asks, those included for a config that had already run: answered as if from a store, at no cost."""
    stopped: bool = False
    """Whether the method ended by itself; otherwise it was ended, because going on would not change its score, or
    because it had asked too often."""
    stated: Stated | None = None


class Oracle:
    """Answers one search over one problem.

    A measured speed is one draw of a noisy figure, so each seed draws another one from the interval that was recorded
    with it (normal with that width, truncated at its ends): the same for all methods, and whenever a config is asked
    for again. Methods are judged by the speeds as recorded.
    """

    def __init__(self, recorded: Recorded, seed: int) -> None:
        self._recorded = recorded
        self._seed = seed
        self._answers: dict[Config, Trial] = {}
        self._times: Counter[Config] = Counter()
        self._runs: list[Trial] = []
        self._asks = 0
        self._close = False

    def ask(self, config: Config, cut: Cut = lambda trial: trial, *, again: bool = False) -> Trial:
        """A trial of `config`, or of the recorded config nearest to it; if `again`, a further run of what has run, at
        the same cost and with a new draw. Raises `Enough` when the search is over."""
        self._count()
        if config not in self._recorded.trials:
            config = self._recorded.problem.nearest(config)
        if again or config not in self._answers:
            self._answers[config] = self._run(config, cut)
        return self._answers[config]

    def trace(self, *, stopped: bool, stated: Stated | None = None) -> Trace:
        """What has been asked so far; `stopped`: whether the method ended by itself."""
        return Trace(runs=tuple(self._runs), asks=self._asks, stopped=stopped, stated=stated)

    def _count(self) -> None:
        all_answered = len(self._answers) == len(self._recorded.trials)
        if all_answered or self._asks >= MOST_ASKS or (self._close and len(self._runs) >= HORIZON):
            raise Enough
        self._asks += 1

    def _run(self, config: Config, cut: Cut) -> Trial:
        recorded = self._recorded.trials[config]
        self._times[config] += 1
        source = random.Random(f"{self._seed} {config.key} {self._times[config]}")
        trial = cut(replace(recorded, outcome=drawn_again(recorded.outcome, source)))
        judged = replace(trial, outcome=recorded.outcome) if isinstance(trial.outcome, Fits) else trial
        self._runs.append(judged)
        self._close |= share_of_speed(judged, self._recorded.best) >= 1.0 - CLOSE
        return trial


def drawn_again(outcome: Outcome, source: random.Random) -> Outcome:
    """The outcome with a new draw of its speed; unchanged where its spread is not known."""
    if not isinstance(outcome, Fits) or not (spread := outcome.measurement.step_seconds.relative_spread):
        return outcome
    offset = math.inf
    while abs(offset) > spread / 2:
        offset = source.gauss(0.0, spread / INTERVAL_DEVIATIONS)
    return Fits(measurement=outcome.measurement.slowed(math.exp(offset)))


SearchMethod = Callable[[Problem, Oracle, int], Stated | None]
"""Searches a problem by asking the oracle for configs, until it is done or the oracle ends it. Everything that is
random must follow from the seed. Raises `CannotRun`."""


def searched(recorded: Recorded, method: SearchMethod, seed: int) -> Trace:
    """Run one search of one method. Raises `CannotRun` if something that it needs is missing here."""
    oracle = Oracle(recorded, seed)
    try:
        return oracle.trace(stated=method(recorded.problem, oracle, seed), stopped=True)
    except Enough:
        return oracle.trace(stopped=False)
