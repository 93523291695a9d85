"""What running an untried config may bring, and what it would cost."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autofit.frontier import Point, pareto
from autofit.lattice import Config, Lattice
from autofit.outcome import Fits, TimedOut
from autofit.search.budget import TIMING_SECONDS
from autofit.search.foresight import Foresight, ran_out_on_device, time_error
from autofit.search.knowledge import Knowledge
from autofit.search.surrogate import ACTIVATIONS, SETUP, TIME, LogLinear, LogNormal, Prior, mean_above

Array = NDArray[np.float64]

WORTHWHILE_GAIN = 0.01
"""Expected relative gain below which an untried config is not worth its trial."""
LUCK = 0.24
"""Half-widths by which the luckier of two equal configs is expected to win: a normal deviate's positive part has mean
0.40, and the half-width of a 90 % interval is 1.64 deviations. A gain no larger than that cannot be told from noise."""
MAX_HALF_WIDTH = 0.10
"""Above this a machine is so busy that its spread says more of the other work than of the next trial."""
LEAST_REPEATS = 5
"""Steps that every trial runs whatever they take, about."""
CANNOT_FIT = 1e-3
"""Probability of fitting below which a predicted config is not run: three deviations of the errors seen, about."""
NORMAL_DRAWS = np.array([-1.75, -1.15, -0.76, -0.45, -0.15, 0.15, 0.45, 0.76, 1.15, 1.75])
"""Midpoints of ten equally likely parts of the normal distribution: expectations are averages over these."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An open config with what running it may bring."""

    config: Config
    expected_gain: float
    """Expected gain of the best speed of its method, plus that of the frontier's area; relative, 0.01 is 1 %."""
    fit_probability: float
    expected_seconds: float
    """Of its trial, set-up included."""

    @property
    def rate(self) -> float:
        """Expected gain per second of trial: a compiled config must gain more, because its trial takes minutes."""
        return self.expected_gain / self.expected_seconds


class Advice:
    """Expected gains of the open configs, from the lattice, the trials so far and the memory floor."""

    def __init__(self, knowledge: Knowledge, floor: Callable[[Config], int]) -> None:
        self._knowledge = knowledge
        configs, axes = knowledge.lattice.configs, knowledge.lattice.axes
        self._floors = {c: floor(c) for c in configs}
        self._time = LogLinear(axes, configs, TIME)
        self._memory = LogLinear(axes, configs, ACTIVATIONS)
        """Of the bytes above the floor."""
        self._setup = LogLinear(axes, configs, SETUP)
        self._predicted: frozenset[Config] = frozenset()
        self._sizes: dict[Config, float] = {}
        """Logarithm of every config's predicted bytes; empty without predictions."""
        self._candidates: tuple[int, list[Candidate]] = (-1, [])

    def foresee(self, foresight: Foresight) -> None:
        """From here on memory, and time where it is predicted, are those predicted up to an error that trials show.

        Predictions of less than half of the configs that the floor leaves change nothing.
        """
        lattice = self._knowledge.lattice
        left = sum(floor <= self._knowledge.memory_limit_bytes for floor in self._floors.values())
        known = {c: foresight.predictions[c] for c in lattice.configs if c in foresight.predictions}
        if not known or 2 * len(known) < left:
            return
        self._predicted = frozenset(known)
        self._floors = dict.fromkeys(lattice.configs, 0)
        self._sizes = _completed(lattice, {c: math.log(max(p.device_bytes, 1)) for c, p in known.items()}, ACTIVATIONS)
        self._memory = LogLinear(lattice.axes, lattice.configs, foresight.memory_error, self._sizes)
        seconds = {c: math.log(p.step_seconds) for c, p in known.items() if p.step_seconds is not None}
        if 2 * len(seconds) >= len(known):
            stated = np.median([1.0 if p.relative_error is None else p.relative_error for p in known.values()])
            times = _completed(lattice, seconds, TIME)
            self._time = LogLinear(lattice.axes, lattice.configs, time_error(float(stated)), times)
        self._candidates = (-1, [])

    def best(self, seconds_left: float | None = None) -> Candidate | None:
        """The candidate to run next; None if none is worth its trial, or none can end within `seconds_left`."""
        affordable = (c for c in self.worthwhile() if seconds_left is None or c.expected_seconds <= seconds_left)
        return next(affordable, None)

    def worthwhile(self) -> list[Candidate]:
        """The candidates whose expected gain could be told from noise, the highest rate first."""
        least = self.worthwhile_gain()
        return [c for c in self._possible() if c.expected_gain >= least] or self._lightest()

    def predicted_out(self) -> list[Config]:
        """The open configs that are not run, because they are predicted not to fit by more than predictions err."""
        tried = {c.config for c in self._lightest()}
        return [c.config for c in self.candidates() if self._cannot_fit(c) and c.config not in tried]

    def _possible(self) -> list[Candidate]:
        return [c for c in self.candidates() if not self._cannot_fit(c)]

    def _cannot_fit(self, candidate: Candidate) -> bool:
        return candidate.config in self._predicted and candidate.fit_probability < CANNOT_FIT

    def _lightest(self) -> list[Candidate]:
        """Where nothing has fitted and nothing is predicted to: the lightest of each method, unless one of the method
        is under way, or one that is predicted lighter has run out. A prediction is no proof that nothing fits."""
        knowledge = self._knowledge
        if knowledge.points() or self._possible():
            return []
        under_way = {c.text("method") for c in knowledge.under_way}
        ran_out: dict[str, float] = {}
        for config, trial in knowledge.trials.items():
            if knowledge.does_not_fit(trial) and config in self._sizes:
                method = config.text("method")
                ran_out[method] = min(self._sizes[config], ran_out.get(method, math.inf))
        lightest: dict[str, Candidate] = {}
        for candidate in sorted(self.candidates(), key=lambda c: self._sizes[c.config]):
            method = candidate.config.text("method")
            if method not in under_way and self._sizes[candidate.config] < ran_out.get(method, math.inf):
                lightest.setdefault(method, candidate)
        return list(lightest.values())

    def worthwhile_gain(self) -> float:
        """The expected gain below which a trial is not worth it, given how noisy the trials so far were. Until
        something fits every trial is: that nothing does is told of what was tried, not of what is unlikely."""
        points = self._knowledge.points()
        if not points:
            return 0.0
        spreads = [p.measurement.step_seconds.relative_spread for p in points]
        known = [s for s in spreads if s is not None]
        if not known:
            return WORTHWHILE_GAIN
        return max(WORTHWHILE_GAIN, LUCK * min(float(np.median(known)) / 2, MAX_HALF_WIDTH))

    def candidates(self) -> list[Candidate]:
        """Every open config with its expected gain, the highest rate first."""
        if self._candidates[0] != self._knowledge.version:
            self._candidates = (self._knowledge.version, self._weighed())
        return self._candidates[1]

    def _weighed(self) -> list[Candidate]:
        open_configs = self._knowledge.open
        if not open_configs:
            return []
        measured = [(p.config, p.measurement) for p in self._knowledge.measured()]
        time = self._time.predict([(c, math.log(m.step_seconds.median)) for c, m in measured], open_configs)
        memory = self._memory_above_floor(open_configs)
        seconds = self._seconds(time, open_configs)
        points = self._knowledge.points()
        methods = np.array([c.text("method") for c in open_configs])
        floors = np.array([self._floors[c] for c in open_configs], dtype=float)
        gain, probability = np.zeros(len(open_configs)), np.zeros(len(open_configs))
        for method in dict.fromkeys(methods.tolist()):
            chosen = np.flatnonzero(methods == method)
            own = [p for p in points if p.method == method]
            gain[chosen], probability[chosen] = self._gains(
                floors[chosen], _part(time, chosen), _part(memory, chosen), own
            )
        figures = np.column_stack((gain, probability, seconds)).tolist()
        order = np.argsort(-gain / seconds, kind="stable")
        return [Candidate(open_configs[i], *figures[i]) for i in order]

    def _memory_above_floor(self, configs: Sequence[Config]) -> LogNormal:
        """The logarithm of the bytes above the floor. What ran out took more than its limit left it: how much more is
        expected from what is known otherwise."""
        known = [
            (p.config, self._above_floor(p.config, p.measurement.device_bytes)) for p in self._knowledge.measured()
        ]
        ran_out = [
            (config, self._above_floor(config, trial.memory_limit_bytes))
            for config, trial in self._knowledge.trials.items()
            if ran_out_on_device(trial)
        ]
        expected = self._memory.predict(known, [c for c, _ in ran_out]) if ran_out else None
        if expected is not None:
            beyond = zip(ran_out, expected.mean, expected.deviation, strict=True)
            known += [
                (c, mean_above(least, mean, deviation))
                for (c, least), mean, deviation in beyond
                if not self._predicted or least > mean - deviation  # else it shows nothing that was not foreseen
            ]
        return self._memory.predict(known, configs)

    def _above_floor(self, config: Config, total: int) -> float:
        return math.log(max(total - self._floors.get(config, 0), 1))

    def _seconds(self, time: LogNormal, configs: Sequence[Config]) -> Array:
        """Expected seconds of the configs' trials. One that was killed at its deadline took at least that."""
        known = []
        for config, trial in self._knowledge.trials.items():
            if isinstance(trial.outcome, Fits):
                known.append((config, math.log(max(trial.outcome.measurement.setup_seconds, 0.1))))
            elif isinstance(trial.outcome, TimedOut):
                known.append((config, math.log(max(trial.outcome.deadline_seconds, 0.1))))
        setup = np.exp(self._setup.predict(known, configs).mean)
        return np.asarray(setup + np.maximum(TIMING_SECONDS, LEAST_REPEATS * np.exp(time.mean)))

    def _gains(self, floors: Array, time: LogNormal, above: LogNormal, points: Sequence[Point]) -> tuple[Array, Array]:
        """Expected gain and probability of fitting, of configs of one method whose points so far are given."""
        limit = float(self._knowledge.memory_limit_bytes)
        room = np.log(np.maximum(limit - floors, 1.0))
        probability = normal_share_below((room - above.mean) / above.deviation)
        if not points:
            # Nothing of this method has fitted yet: the fastest that is likely to fit comes first.
            speed = np.exp(-time.mean)
            return probability * (1.0 + speed / speed.max()), probability
        best = min(p.measurement.step_seconds.median for p in points)
        draws = time.mean[:, None] + time.deviation[:, None] * NORMAL_DRAWS[None, :]
        speedup = best / np.exp(draws)  # 1 is the best so far
        faster = np.maximum(0.0, speedup - 1.0).mean(axis=1) * probability
        memory = floors + np.exp(above.mean)
        area = _area_gain(points, best, memory, np.exp(math.log(best) - time.mean), limit)
        return faster + 0.5 * area * probability, probability


def normal_share_below(deviations: Array) -> Array:
    """The probability that a normal variable is less than so many deviations above its mean."""
    return np.array([math.erfc(-d / math.sqrt(2)) / 2 for d in deviations])


ENOUGH = 500
"""Known configs that tell the axes' effects as well as thousands would, in a regression whose cost is their cube."""


def _completed(lattice: Lattice, logarithms: dict[Config, float], prior: Prior) -> dict[Config, float]:
    """The same with what the axes' effects make of it for the configs that are missing."""
    missing = [c for c in lattice.configs if c not in logarithms]
    if not missing:
        return logarithms
    model = LogLinear(lattice.axes, lattice.configs, prior)
    every = list(logarithms.items())
    known = every if len(every) <= ENOUGH else random.Random(0).sample(every, ENOUGH)
    return logarithms | dict(zip(missing, model.predict(known, missing).mean.tolist(), strict=True))


def _part(found: LogNormal, chosen: NDArray[np.intp]) -> LogNormal:
    return LogNormal(mean=found.mean[chosen], deviation=found.deviation[chosen])


def _area_gain(points: Sequence[Point], best: float, memory: Array, speedup: Array, limit: float) -> Array:
    """Growth of the area under the frontier by one more point, for each of many; memory in bytes, which counts as a
    share of the limit, and speed as a multiple of the best point's."""
    front = pareto(points)
    starts = np.array([0.0, *(p.measurement.device_bytes / limit for p in front)])
    heights = np.array([0.0, *(best / p.measurement.step_seconds.median for p in front)])
    ends = np.append(starts[1:], 1.0)
    widths = np.maximum(0.0, ends[None, :] - np.maximum(starts[None, :], (memory / limit)[:, None]))
    return np.asarray((np.maximum(0.0, speedup[:, None] - heights[None, :]) * widths).sum(axis=1))
