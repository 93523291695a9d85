"""The only source of outcomes for every search method: looks them up, counts, and records what was paid for."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autofit.lattice import Config
from autofit.outcome import Fits, Outcome, StepSeconds, Trial
from autofit.repeatability import INTERVAL_DEVIATIONS
from autofit.search.replay.recorded import Recorded, share_of_speed
from autofit.search.replay.trace import Run, Stated, Trace

HORIZON = 40
"""Trials that every search may run, whatever it has found."""
MOST_ASKS = 3 * HORIZON
"""Asks after which a search is ended: an overconfident model asks for the same config again and again."""
CLOSE = 0.01
"""Relative distance from the table's best speed at which a search that has run its horizon is ended."""


Cut = Callable[[Trial], Trial]
"""How a trial ends where whoever asks for it does not let it run to its end."""
Changing = Callable[[Trial, Sequence[Run]], Trial]
"""A trial on a device that changes, given what it has run before."""


class Enough(BaseException):
    """The search is ended from outside. Not an `Exception`: rivals catch those, and would go on."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a trial shows, and what it cost."""

    outcome: Outcome
    seconds: float


class Oracle:
    """Answers one search over one problem.

    A measured speed is one draw of a noisy figure, so each seed draws another one from the interval that was recorded
    with it (normal with that width, truncated at its ends): the same for all methods, and whenever a config is asked
    for again. Methods are judged by the speeds as recorded. Such an interval says how well a process knew its own
    speed; `between` adds what executions differ by (the standard deviation of the logarithm of speed), of which the
    method is told nothing, nor of a device that is `changing`.
    """

    def __init__(
        self,
        recorded: Recorded,
        seed: int,
        *,
        between: float = 0.0,
        changing: Changing = lambda trial, before: trial,
    ) -> None:
        self._recorded = recorded
        self._seed = seed
        self._between = between
        self._changing = changing
        self._best = recorded.best
        self._answers: dict[Config, Answer] = {}
        self._times: Counter[Config] = Counter()
        self._runs: list[Run] = []
        self._asks = self._repeats = self._outside = 0
        self._close = False
        self._stated: Stated | None = None

    def ask(self, config: Config, cut: Cut = lambda trial: trial) -> Answer:
        """The outcome of `config`, or of the recorded config nearest to it. Raises `Enough` when the search is over."""
        if self._is_over():
            raise Enough
        self._asks += 1
        if config not in self._recorded.trials:
            self._outside += 1
            config = self._recorded.problem.nearest(config)
        if config in self._answers:
            self._repeats += 1
            return self._answers[config]
        self._answers[config] = answer = self._run(config, cut)
        return answer

    def run_again(self, config: Config, cut: Cut = lambda trial: trial) -> Answer:
        """A second run of a recorded config, for methods that want one: same cost as the first, with a new draw."""
        if self._is_over():
            raise Enough
        self._asks += 1
        return self._run(config, cut)

    def hear(self, stated: Stated) -> None:
        """Take note of what a search states when it ends."""
        self._stated = stated

    def trace(self, *, stopped: bool) -> Trace:
        """What has been asked so far; `stopped`: whether the method ended by itself."""
        return Trace(
            runs=tuple(self._runs),
            asks=self._asks,
            repeats=self._repeats,
            outside=self._outside,
            stopped=stopped,
            stated=self._stated,
        )

    def _is_over(self) -> bool:
        told = len(self._answers) == len(self._recorded.trials)
        return told or self._asks >= MOST_ASKS or (self._close and len(self._runs) >= HORIZON)

    def _run(self, config: Config, cut: Cut) -> Answer:
        recorded = self._recorded.trials[config]
        self._times[config] += 1
        source = random.Random(f"{self._seed} {config.key} {self._times[config]}")
        on_device = self._changing(recorded, self._runs)
        trial = cut(replace(on_device, outcome=drawn_again(on_device.outcome, source, between=self._between)))
        judged = recorded.outcome if isinstance(trial.outcome, Fits) else trial.outcome
        self._runs.append(Run(config=config, outcome=judged, seconds=trial.seconds))
        self._close |= share_of_speed(config, judged, self._best) >= 1.0 - CLOSE
        return Answer(trial.outcome, trial.seconds)


def drawn_again(outcome: Outcome, source: random.Random, *, between: float = 0.0) -> Outcome:
    """The outcome with a new draw of its speed; unchanged where neither its spread is known nor executions differ."""
    if not isinstance(outcome, Fits):
        return outcome
    measured = outcome.measurement
    spread = measured.step_seconds.relative_spread
    if not spread and not between:
        return outcome
    deviation, most = (spread or 0.0) / INTERVAL_DEVIATIONS, (spread or 0.0) / 2
    offset = math.inf if spread else 0.0
    while abs(offset) > most:
        offset = source.gauss(0.0, deviation)
    factor = math.exp(offset + (source.gauss(0.0, between) if between else 0.0))
    seconds = StepSeconds(
        median=measured.step_seconds.median * factor, p95=measured.step_seconds.p95 * factor, relative_spread=spread
    )
    speed = measured.tokens_per_second / factor
    return Fits(measurement=replace(measured, tokens_per_second=speed, step_seconds=seconds))
