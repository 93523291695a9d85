"""The expected gain and cost of running an untried config."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autofit.frontier import MAX_TIE, Point
from autofit.lattice import Config, Lattice
from autofit.outcome import Fits, TimedOut
from autofit.search.budget import TIMING_SECONDS
from autofit.search.foresight import Foresight, ran_out_on_device, time_error
from autofit.search.gains import Front, expected_gain, gain_over, normal_share_below
from autofit.search.knowledge import Knowledge
from autofit.search.regret import regret_bound, timing_deviation
from autofit.search.surrogate import ACTIVATIONS, SETUP, TIME, LogLinear, LogNormal, Prior, Rows, mean_above
from autofit.techniques import only_slower

Array = NDArray[np.float64]

WORTHWHILE_GAIN = 0.01
"""Expected relative gain below which an untried config is not worth its trial."""
CONTEST_GAIN = MAX_TIE / 2
"""Expected gain over the winner from which a config that was measured once runs again: less would be likely to end in a
tie, and so to leave the recommendation as it is."""
MOST_RUNS = 3
"""How often a config runs that must be faster than the winner, as long as its last run said otherwise: were both of two
runs slow by chance, the recommendation would do work for nothing."""
LUCK = 0.24
"""Half-widths by which the luckier of two equal configs is expected to win: a normal deviate's positive part has mean
0.40, and the half-width of a 90 % interval is 1.64 deviations. A gain no larger than that cannot be told from noise."""
MAX_HALF_WIDTH = 0.10
"""Above this a machine is so busy that its spread says more about the other work than about the next trial."""
LEAST_REPEATS = 3
"""How many steps every trial times, however long they take; those of its warm-up count as set-up."""
BESIDE = 0.1
"""Weight of a gain in a method that is not going to be recommended, because a more faithful one fits: it is only shown
beside the recommendation. So each such method gets the trial that may be its fastest, and more only where a tenth of
what they gain is worth a trial."""
AREA_BESIDE = 0.2
"""Weight of a gain in the area under a method's frontier, against one in its best speed: it, too, is only shown beside
the recommendation."""
AREA_THOROUGH = 0.5
"""The same in a thorough search, which is for the frontier."""
LIKELY = 0.5
"""Probability of fitting below which a config is left alone once something has fitted, unless it may gain much: a trial
that runs out of memory shows nothing about speed, and one that surely fits teaches the same. A thorough search comes to
them last."""
MUCH = 0.1
"""Expected gain, the chance of fitting included, for which a config is tried although it is likelier to run out."""
POSSIBLE = MUCH
"""Probability of fitting from which a method may still be the one to recommend: no less than what makes the search try
one of its configs, whose gain is at least that probability as long as nothing of the method has fitted."""
ROOM = 0.05
"""Share of the limit that a config must leave free for its speed to be a bound on others': closer to the limit, an
allocator may spend time on making room."""
UNLUCKY = 2.0
"""Deviations of its timing by which a measured config may have seemed slower than it is: the regret bound allows for
that, although it is so rare that a trial for it would seldom pay."""
CANNOT_FIT = 1e-3
"""Probability of fitting below which a predicted config is not run: about three deviations of the errors seen."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An open config with what running it may gain."""

    config: Config
    expected_gain: float
    """Expected gain in the best speed of its method, plus a share of that in the frontier's area (`AREA_BESIDE`,
    `AREA_THOROUGH`); relative, 0.01 is 1 %. Multiplied by `BESIDE` where another method is going to be recommended."""
    fit_probability: float
    expected_seconds: float
    """Duration of its trial, set-up included."""

    @property
    def rate(self) -> float:
        """Expected gain per second of trial: a compiled config must gain more, because its trial takes minutes."""
        return self.expected_gain / self.expected_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weighed:
    """What running each open config may gain: one entry per config. The method that is going to be recommended comes
    first, so that a search cut short has its best; then the highest rate."""

    rows: Rows
    """Positions of the configs in their lattice."""
    gain: Array
    probability: Array
    """Of fitting."""
    seconds: Array
    cannot_fit: NDArray[np.bool_]
    """Whether a config is predicted to exceed the limit by more than predictions err."""


class Advice:
    """Expected gains of the open configs, from the lattice, the trials so far and the memory floor."""

    def __init__(
        self,
        knowledge: Knowledge,
        floor: Callable[[Config], int],
        methods: Sequence[str] = (),
        *,
        thorough: bool = False,
    ) -> None:
        """`methods`: the most faithful first; the first that fits will be recommended. If empty, all count alike.
        `thorough`: so they do for a whole frontier, and any gain is worth its trial."""
        self._knowledge = knowledge
        self._faithful = () if thorough else tuple(methods)
        self._thorough = thorough
        self._area_weight = AREA_THOROUGH if thorough else AREA_BESIDE
        configs, axes = knowledge.lattice.configs, knowledge.lattice.axes
        self._row_of = {c: row for row, c in enumerate(configs)}
        self._methods = np.array([c.text("method") for c in configs])
        self._floors = np.array([floor(c) for c in configs], dtype=float)
        self._time = LogLinear(axes, configs, TIME)
        self._memory = LogLinear(axes, configs, ACTIVATIONS)
        """For the bytes above the floor."""
        self._setup = LogLinear(axes, configs, SETUP)
        self._predicted = np.zeros(len(configs), dtype=bool)
        self._sizes: dict[Config, float] = {}
        """Logarithm of every config's predicted bytes; empty without predictions."""
        self._weighed_at: tuple[int, _Weighed | None] = (-1, None)
        """The version of the knowledge that was weighed, and the result."""

    def foresee(self, foresight: Foresight) -> None:
        """From now on, take memory, and time where it is predicted, as predicted up to an error learnt from trials.

        Predictions for fewer than half of the configs that the floor leaves change nothing.
        """
        lattice = self._knowledge.lattice
        left = np.count_nonzero(self._floors <= self._knowledge.memory_limit_bytes)
        known = {c: foresight.predictions[c] for c in lattice.configs if c in foresight.predictions}
        if not known or 2 * len(known) < left:
            return
        self._predicted = np.array([c in known for c in lattice.configs])
        self._floors = np.zeros(len(lattice.configs))
        self._sizes = _completed(lattice, {c: math.log(max(p.device_bytes, 1)) for c, p in known.items()}, ACTIVATIONS)
        error, rough = foresight.errors_of_memory()
        self._memory = LogLinear(lattice.axes, lattice.configs, error, self._sizes, rough)
        seconds = {c: math.log(p.step_seconds) for c, p in known.items() if p.step_seconds is not None}
        if 2 * len(seconds) >= len(known):
            stated = np.median([1.0 if p.relative_error is None else p.relative_error for p in known.values()])
            times = _completed(lattice, seconds, TIME)
            self._time = LogLinear(
                lattice.axes, lattice.configs, time_error(float(stated), foresight.effects_factor), times
            )
        self._weighed_at = (-1, None)

    def best(self, seconds_left: float | None = None) -> Candidate | None:
        """The candidate to run next; None if none is worth its trial, or none can end within `seconds_left`."""
        weighed, worth = self._weighed(), self._worthwhile()
        if not worth.any():
            affordable = (c for c in self._lightest() if seconds_left is None or c.expected_seconds <= seconds_left)
            return next(affordable, None)
        if seconds_left is not None:
            worth &= weighed.seconds <= seconds_left
        return self._candidate(int(worth.argmax())) if worth.any() else None

    def first(self) -> Candidate:
        """The first open config, whether worth its trial or not."""
        return self._candidate(0)

    def worthwhile(self) -> list[Candidate]:
        """The candidates whose expected gain could be told from noise, the one to run next first."""
        return [self._candidate(int(i)) for i in np.flatnonzero(self._worthwhile())] or self._lightest()

    def predicted_out(self) -> list[Config]:
        """The open configs that are not run, because they are predicted to exceed the limit by more than predictions
        err."""
        weighed, configs = self._weighed(), self._knowledge.lattice.configs
        out = [configs[row] for row in weighed.rows[weighed.cannot_fit]]
        tried = {c.config for c in self._lightest()} if out else set()
        return [c for c in out if c not in tried] if tried else out

    def contender(self, winner: Point) -> Point | None:
        """The config, measured once, from whose second run the most is to be expected: that it is the faster one of its
        method after all, as it must be if the winner does all of its work and more; such a one may run a third time.
        None if that is not worth the run."""
        own = [p for p in self._knowledge.points() if p.method == winner.method and p.config != winner.config]
        room = (1.0 - ROOM) * self._knowledge.memory_limit_bytes
        gains = {}
        for number, rival in enumerate(own):
            is_faster = winner.config in only_slower(rival.config) and rival.measurement.device_bytes <= room
            if not rival.measurement.stopped_early and rival.runs < (MOST_RUNS if is_faster else 2):
                gains[number] = gain_over(winner, rival, is_faster=is_faster)
        most = max(gains, key=gains.__getitem__, default=None)
        if most is None or gains[most] <= max(self._noise_gain(), CONTEST_GAIN):
            return None
        return own[most]

    def regret_bound(self, winner: Point) -> float:
        """Upper bound, with `regret.CONFIDENCE`, on how much slower `winner` is than the best of its method, as a share
        of the best speed: open configs may fit and be faster, and measured ones may be faster than they seemed."""
        rows = self._weighed().rows
        own = self._methods[rows] == winner.method
        untried = self._step_time(rows[own])
        tried = [p for p in self._knowledge.points() if p.method == winner.method and p.config != winner.config]
        rivals = LogNormal(
            mean=np.append(untried.mean, [math.log(p.measurement.step_seconds.median) for p in tried]),
            deviation=np.append(untried.deviation, [timing_deviation(p) for p in tried]),
        )
        probability = np.append(self._weighed().probability[own], np.ones(len(tried)))
        least = np.append(self._least_times(rows[own], unlucky=UNLUCKY), np.full(len(tried), -math.inf))
        return regret_bound(winner, rivals, probability, least)

    def expected_seconds(self, config: Config) -> float:
        """Expected duration of the trial of a config of the lattice, set-up included."""
        rows = self._rows([config])
        return float(self._seconds(self._step_time(rows), rows)[0])

    def _worthwhile(self) -> NDArray[np.bool_]:
        weighed = self._weighed()
        worth = np.asarray((weighed.gain >= self.worthwhile_gain()) & ~weighed.cannot_fit)
        if not self._knowledge.points():
            return worth
        likely = worth & ((weighed.probability >= LIKELY) | (weighed.gain >= MUCH))
        return worth if self._thorough and not likely.any() else likely

    def _lightest(self) -> list[Candidate]:
        """What to try where nothing has fitted and nothing is predicted to, because a prediction is no proof of that:
        the lightest config of each method, unless one of the method is under way, or one predicted to be no heavier has
        run out of memory. Empty otherwise."""
        knowledge = self._knowledge
        if knowledge.points() or not self._weighed().cannot_fit.all():
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
        """The expected gain below which a config is not worth its trial, given how noisy the trials so far were. Until
        something fits, every config is: a claim that nothing does must rest on trials, not on what is unlikely."""
        return 0.0 if self._thorough or not self._knowledge.points() else self._noise_gain()

    def _noise_gain(self) -> float:
        """The gain that two equal configs may seem to have over each other, and at least what is worth a trial."""
        spreads = [p.relative_spread for p in self._knowledge.points()]
        known = [s for s in spreads if s is not None]
        if not known:
            return WORTHWHILE_GAIN
        return max(WORTHWHILE_GAIN, LUCK * min(float(np.median(known)) / 2, MAX_HALF_WIDTH))

    def candidates(self) -> list[Candidate]:
        """Every open config with its expected gain, in the order of `_Weighed`."""
        return [self._candidate(i) for i in range(len(self._weighed().rows))]

    def _candidate(self, number: int) -> Candidate:
        w = self._weighed()
        config = self._knowledge.lattice.configs[w.rows[number]]
        return Candidate(config, float(w.gain[number]), float(w.probability[number]), float(w.seconds[number]))

    def _weighed(self) -> _Weighed:
        version, weighed = self._weighed_at
        if weighed is None or version != self._knowledge.version:
            weighed = self._weigh()
            self._weighed_at = (self._knowledge.version, weighed)
        return weighed

    def _weigh(self) -> _Weighed:
        rows = self._rows(self._knowledge.open)
        time, (memory, probability) = self._step_time(rows), self._fit(rows)
        seconds = self._seconds(time, rows)
        methods = self._methods[rows]
        fronts, least = self._fronts(), self._least_times(rows)
        gain = np.zeros(len(rows))
        for method in np.unique(methods).tolist():
            own = np.flatnonzero(methods == method)
            front = fronts.get(method)
            if front is None:
                # Nothing of this method has fitted yet: the fastest that is likely to fit comes first.
                speed = np.exp(-time.mean[own])
                gain[own] = 1.0 + speed / speed.max()
            else:
                limit = float(self._knowledge.memory_limit_bytes)
                gain[own] = expected_gain(
                    front, _part(time, own), least[own], memory[own], limit, area_weight=self._area_weight
                )
        gain *= probability
        recommended = self._recommended(fronts, methods, probability)
        beside = methods != recommended if recommended is not None else np.zeros(len(rows), dtype=bool)
        gain[beside] *= BESIDE
        order = np.lexsort((-gain / seconds, beside))
        return _Weighed(
            rows=rows[order],
            gain=gain[order],
            probability=probability[order],
            seconds=seconds[order],
            cannot_fit=(self._predicted[rows] & (probability < CANNOT_FIT))[order],
        )

    def _recommended(self, fronts: Mapping[str, Front], methods: NDArray[np.str_], probability: Array) -> str | None:
        """The most faithful method that has fitted or still may. Until something has fitted, it must be likely to, by
        its predicted memory; without predictions none is, and anything that fits is what the user needs."""
        if not fronts and not self._predicted.any():
            return None
        possible = methods[probability >= (POSSIBLE if fronts else LIKELY)]
        return next((m for m in self._faithful if m in fronts or m in possible), None)

    def _fronts(self) -> dict[str, Front]:
        """The frontier of each method that has one. What is under way and likely to fit counts as if it had shown what
        is expected of it: what is asked for meanwhile should be worth its trial beside that."""
        points, rows = self._knowledge.points(), self._under_way()
        shown = [(p.method, float(p.measurement.device_bytes), p.measurement.step_seconds.median) for p in points]
        memory, probability = self._fit(rows)
        seconds, likely = np.exp(self._step_time(rows).mean), probability >= LIKELY
        shown += zip(*(expected[likely].tolist() for expected in (self._methods[rows], memory, seconds)), strict=True)
        methods = {method for method, _, _ in shown}
        return {m: Front.of((memory, seconds) for method, memory, seconds in shown if method == m) for m in methods}

    def _rows(self, configs: Iterable[Config]) -> Rows:
        return np.fromiter((self._row_of[c] for c in configs), dtype=np.intp)

    def _under_way(self) -> Rows:
        return np.sort(self._rows(self._knowledge.under_way))

    def _step_time(self, rows: Rows) -> LogNormal:
        """The logarithm of seconds per step."""
        measured = self._knowledge.measured()
        known = [(p.config, math.log(p.measurement.step_seconds.median)) for p in measured]
        return self._time.predict_rows(known, rows, [timing_deviation(p) for p in measured], self._under_way())

    def _least_times(self, rows: Rows, *, unlucky: float = 0.0) -> Array:
        """The logarithm of the seconds that a step of each config takes at least, because a measured one does part of
        its work and nothing else; minus infinity where there is none. By so many deviations of its timing the measured
        one may have been `unlucky`, and seemed slower than it is."""
        least = np.full(len(self._knowledge.lattice.configs), -math.inf)
        for point in self._knowledge.points():
            m = point.measurement  # one that was stopped early is too uncertain to bound others
            if not m.stopped_early and m.device_bytes <= (1.0 - ROOM) * self._knowledge.memory_limit_bytes:
                slower = self._rows(c for c in only_slower(point.config) if c in self._row_of)
                luckier = math.log(m.step_seconds.median) - unlucky * timing_deviation(point)
                least[slower] = np.maximum(least[slower], luckier)
        return least[rows]

    def _fit(self, rows: Rows) -> tuple[Array, Array]:
        """Expected bytes, and the probability of fitting: 1 for what a trial of something heavier has shown to fit."""
        floors, above = self._floors[rows], self._memory_above_floor(rows)
        room = np.log(np.maximum(self._knowledge.memory_limit_bytes - floors, 1.0))
        probability = normal_share_below((room - above.mean) / above.deviation)
        configs = self._knowledge.lattice.configs
        probability[[self._knowledge.is_below_a_fit(configs[row]) for row in rows]] = 1.0
        return floors + np.exp(above.mean), probability

    def _memory_above_floor(self, rows: Rows) -> LogNormal:
        """The logarithm of the bytes above the floor. A config that ran out needed more than its limit left above the
        floor; how much more is the expectation from everything else that is known."""
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
                if not self._predicted.any() or least > mean - deviation  # else it was foreseen and shows nothing
            ]
        return self._memory.predict_rows(known, rows)

    def _above_floor(self, config: Config, total: int) -> float:
        row = self._row_of.get(config)
        return math.log(max(total - (0.0 if row is None else self._floors[row]), 1.0))

    def _seconds(self, time: LogNormal, rows: Rows) -> Array:
        """Expected seconds of the configs' trials. One killed at its deadline counts as a set-up that took as long."""
        known = []
        for config, trial in self._knowledge.trials.items():
            if isinstance(trial.outcome, Fits):
                known.append((config, math.log(max(trial.outcome.measurement.setup_seconds, 0.1))))
            elif isinstance(trial.outcome, TimedOut):
                known.append((config, math.log(max(trial.outcome.deadline_seconds, 0.1))))
        setup = np.exp(self._setup.predict_rows(known, rows).mean)
        return np.asarray(setup + np.maximum(TIMING_SECONDS, LEAST_REPEATS * np.exp(time.mean)))


ENOUGH = 500
"""Known configs that determine the axes' effects as well as thousands would, in a regression of cubic cost."""


def _completed(lattice: Lattice, logarithms: dict[Config, float], prior: Prior) -> dict[Config, float]:
    """`logarithms`, with those of the missing configs filled in from the axes' effects."""
    missing = [c for c in lattice.configs if c not in logarithms]
    if not missing:
        return logarithms
    model = LogLinear(lattice.axes, lattice.configs, prior)
    every = list(logarithms.items())
    known = every if len(every) <= ENOUGH else random.Random(0).sample(every, ENOUGH)
    return logarithms | dict(zip(missing, model.predict(known, missing).mean.tolist(), strict=True))


def _part(found: LogNormal, chosen: NDArray[np.intp]) -> LogNormal:
    return LogNormal(mean=found.mean[chosen], deviation=found.deviation[chosen])
