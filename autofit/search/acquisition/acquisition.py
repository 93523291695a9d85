"""The expected gain and cost of running an untried config."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autofit.core.frontier import MAX_TIE, Point, least_practical_speed, practical
from autofit.core.lattice import Config
from autofit.planning.plan import Plan
from autofit.planning.requests import USUAL_SECONDS
from autofit.prediction.predictions import Predictions
from autofit.search.acquisition.belief import Belief, likeliest
from autofit.search.acquisition.gains import Front, expected_gain, gain_over
from autofit.search.acquisition.step_times import Mixture
from autofit.search.acquisition.surrogate import Array, Rows
from autofit.search.acquisition.suspects import suspicious
from autofit.search.budget import ALLOWANCE_FACTOR, ALLOWANCE_SHARE
from autofit.search.lattice_state import LatticeState
from autofit.techniques import only_slower

WORTHWHILE_GAIN = 0.01
"""Expected relative gain below which an untried config is not worth its trial."""
LUCKY_HALF_WIDTHS = 0.24
"""Half-widths by which the luckier of two equal configs is expected to win: a normal deviate's positive part has mean
0.40, and the half-width of a 90 % interval is 1.64 deviations. A gain no larger than that cannot be told from noise."""
FEW_TRIALS, DOUBTFUL_REGRET, SMALL_GAIN = 5, 0.1, 0.005
"""While fewer configs of the method to recommend are measured, and more than this share of the best speed may be
missed, this expected gain is worth a short trial, too: a belief that rests on so little is no reason to stop."""
OTHER_METHOD_WEIGHT = 0.1
"""Weight of a gain in a method that is not going to be recommended, because a more faithful one fits: it is only shown
beside the recommendation. So each such method gets the trial that may be its fastest, and more only where a tenth of
what they gain is worth a trial."""
LIKELY_FIT = 0.5
"""Probability of fitting below which a config is left alone once something has fitted, unless it may gain much: a trial
that runs out of memory shows nothing about speed, and one that surely fits teaches the same. A thorough search comes to
them last."""
LARGE_GAIN = 0.1
"""Expected gain, the chance of fitting included, for which a config is tried although it is likelier to run out."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An open config with what running it may gain."""

    config: Config
    expected_gain: float
    """Expected gain in the best speed of its method, plus a share of that in the area under its frontier, which is only
    shown beside the recommendation: a fifth, or half in a thorough search. Relative, 0.01 is 1 %. Multiplied by
    `OTHER_METHOD_WEIGHT` where another method is going to be recommended."""
    fit_probability: float
    expected_seconds: float
    """Duration of its trial, set-up included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weighed:
    """What running each open config may gain: one entry per config.

    Trials that take more of the time budget than any may, those that are likelier to run out of memory once something
    has fitted, and those that would likely crash as others have, come last; the method that is going to be recommended
    comes first, once something of it is measured; then the highest rate.
    """

    rows: Rows
    """Positions of the configs in their lattice."""
    gain: Array
    least_gain: Array
    """From which gain on a config is worth its trial."""
    probability: Array
    """Of fitting."""
    seconds: Array
    """Expected duration of each trial."""
    not_worth_its_time: NDArray[np.bool_]
    """Whether a trial takes more of the time budget than any may, half more than the shortest, and more than it
    promises to gain."""
    cannot_fit: NDArray[np.bool_]
    """Whether a config is predicted to exceed the limit by more than predictions err."""


class Acquisition:
    """Expected gains of the open configs, from the plan of a search and what is known of its lattice."""

    def __init__(self, plan: Plan, state: LatticeState) -> None:
        self._state = state
        self._thorough = plan.thorough
        self._faithful = () if plan.thorough else plan.goal.methods
        """The most faithful method first: the first that fits will be recommended. In a thorough search all count
        alike."""
        self._budget_seconds = plan.limits.seconds or USUAL_SECONDS
        self._area_weight = 0.5 if plan.thorough else 0.2
        self.belief = Belief(plan, state)
        self._weighed_at: tuple[int, _Weighed | None] = (-1, None)
        """The version of the state that was weighed, and the result."""

    def use(self, predictions: Predictions) -> None:
        """From now on, take memory, and time where it is predicted, as predicted up to an error learnt from trials.

        Predictions for fewer than half of the configs that the floor leaves change nothing.
        """
        self.belief.use(predictions)
        self._weighed_at = (-1, None)

    def best(self, seconds_left: float | None = None) -> Candidate | None:
        """The candidate to run next; None if none is worth its trial, or none can end within `seconds_left`."""
        affordable = (c for c in self.worthwhile() if seconds_left is None or c.expected_seconds <= seconds_left)
        return next(affordable, None)

    def first(self) -> Candidate:
        """The first open config, whether worth its trial or not."""
        return self._candidate(0)

    def worthwhile(self) -> Iterator[Candidate]:
        """The candidates whose expected gain could be told from noise, the one to run next first."""
        positions = np.flatnonzero(self._worthwhile())
        yield from map(self._candidate, positions.tolist()) if len(positions) else self._lightest()

    def predicted_out(self) -> list[Config]:
        """The open configs that are not run, because they are predicted to exceed the limit by more than predictions
        err."""
        memory, configs = self.belief.memory, self._state.lattice.configs
        if not memory.predicted.any():
            return []
        rows = self.belief.rows(self._state.open)  # and no gains: progress, which asks after every event, needs none
        out = [configs[row] for row in rows[memory.cannot_fit(rows, memory.fit(rows)[1])]]
        tried = {candidate.config for candidate in self._lightest()} if out else set()
        return [config for config in out if config not in tried]

    def contender(self, winner: Point) -> Point | None:
        """The config, measured once, from whose second run the most is to be expected: that it is the faster one of its
        method after all. It must be if the winner does all of its work and more: such a one may run a third time, as
        two runs may both be slow by chance. None if that is not worth the run: half the gain above which speeds never
        tie, or less, is likely to end in a tie, and so to leave the recommendation as it is."""
        rivals = [p for p in self._state.points() if p.method == winner.method and p.config != winner.config]
        bounding = {p.config for p in self.belief.bounding()} if self.belief.order_doubt() < 1.0 else set()
        gains: list[tuple[float, Point]] = []
        for rival in rivals:
            is_faster = winner.config in only_slower(rival.config) and rival.config in bounding
            if not rival.measurement.stopped_early and rival.runs < (3 if is_faster else 2):
                gains.append((gain_over(winner, rival, is_faster=is_faster), rival))
        gain, contender = max(gains, key=lambda pair: pair[0], default=(0.0, None))
        return contender if gain > max(self._noise_gain(), MAX_TIE / 2) else None

    def _worthwhile(self) -> NDArray[np.bool_]:
        weighed = self._weighed()
        possible = np.asarray((weighed.gain >= weighed.least_gain) & ~weighed.cannot_fit)
        worth = possible & ~weighed.not_worth_its_time
        if not self._state.points():
            return worth if worth.any() else possible  # an answer that takes long is better than none
        likely = worth & ((weighed.probability >= LIKELY_FIT) | (weighed.gain >= LARGE_GAIN))
        return worth if self._thorough and not likely.any() else likely

    def _lightest(self) -> list[Candidate]:
        """What to try where nothing has fitted and nothing is predicted to, because a prediction is no proof of that:
        the lightest config of each method, unless one of the method is under way, or one predicted to be no heavier has
        run out of memory. Empty otherwise."""
        state, sizes = self._state, self.belief.memory.sizes
        if state.points() or not self._weighed().cannot_fit.all():
            return []
        under_way = {c.text("method") for c in state.under_way}
        ran_out = self.belief.memory.least_that_ran_out()
        lightest: dict[str, Candidate] = {}
        for candidate in sorted(self.candidates(), key=lambda c: sizes[c.config]):
            method = candidate.config.text("method")
            if method not in under_way and sizes[candidate.config] < ran_out.get(method, math.inf):
                lightest.setdefault(method, candidate)
        return list(lightest.values())

    def worthwhile_gain(self) -> float:
        """The expected gain below which a config is not worth its trial, given how noisy the trials so far were. Until
        something fits, every config is: a claim that nothing does must rest on trials, not on what is unlikely."""
        return 0.0 if self._thorough or not self._state.points() else self._noise_gain()

    def _doubtful_method(self) -> str | None:
        """The method to recommend, if few of its configs are measured, and much of its speed may be missed."""
        fastest = self._state.fastest(self._faithful)
        chosen = practical({method: p.measurement.tokens_per_second for method, p in fastest.items()})
        if chosen is None or sum(p.method == chosen for p in self._state.points()) >= FEW_TRIALS:
            return None
        return chosen if self.belief.regret_bound(fastest[chosen]) > DOUBTFUL_REGRET else None

    def _noise_gain(self) -> float:
        """The gain that two equal configs may seem to have over each other, and at least what is worth a trial. A
        spread beyond 10 % either way says more about other work on the machine than about the next trial."""
        spreads = [s for p in self._state.points() if (s := p.relative_spread) is not None]
        if not spreads:
            return WORTHWHILE_GAIN
        return max(WORTHWHILE_GAIN, LUCKY_HALF_WIDTHS * min(float(np.median(spreads)) / 2, 0.10))

    def candidates(self) -> list[Candidate]:
        """Every open config with its expected gain, in the order of `_Weighed`."""
        return [self._candidate(i) for i in range(len(self._weighed().rows))]

    def _candidate(self, number: int) -> Candidate:
        w = self._weighed()
        config = self._state.lattice.configs[w.rows[number]]
        return Candidate(config, float(w.gain[number]), float(w.probability[number]), float(w.seconds[number]))

    def _weighed(self) -> _Weighed:
        version, weighed = self._weighed_at
        if weighed is None or version != self._state.version:
            weighed = self._weigh()
            self._weighed_at = (self._state.version, weighed)
        return weighed

    def _weigh(self) -> _Weighed:
        """What each may gain if it fits, by how likely it fits; less where another method is recommended, or where its
        own method, of which nothing is measured, is likely to be slow. Then their order."""
        belief, fronts = self.belief, self._fronts()
        rows = belief.rows(self._state.open)
        time, (memory, probability) = belief.step_time(rows), belief.memory.fit(rows)
        seconds, methods = belief.seconds(time, rows), belief.methods[rows]
        gain, judged_seconds, finishing = self._gains(rows, time, memory, seconds, fronts)
        gain *= probability
        recommended = self._recommended(fronts, methods, probability, np.exp(time.together.mean))
        of_other_method = methods != recommended if recommended is not None else np.zeros(len(rows), dtype=bool)
        gain[of_other_method] *= OTHER_METHOD_WEIGHT
        if fronts:
            unmeasured = ~np.isin(methods, list(fronts))
            gain[unmeasured] *= _speed_beside(fronts, time.part(unmeasured))
        budget_share, takes_long = seconds / self._budget_seconds, self._takes_long(seconds)
        costs_more = takes_long & (gain < budget_share) & (budget_share <= 1.0) & ~(finishing & ~of_other_method)
        comes_last = takes_long | ((probability < LIKELY_FIT) & bool(fronts))
        comes_last |= suspicious([self._state.lattice.configs[row] for row in rows], self._state.trials.values())
        # A search that is cut short has its best: other methods wait, unless that of the best is yet to be measured.
        waits = of_other_method & (recommended in fronts)
        order = np.lexsort((-gain / judged_seconds, waits, comes_last))
        return _Weighed(
            rows=rows[order],
            gain=gain[order],
            least_gain=self._least_gain(methods, budget_share)[order],
            probability=probability[order],
            seconds=seconds[order],
            not_worth_its_time=costs_more[order],
            cannot_fit=belief.memory.cannot_fit(rows, probability)[order],
        )

    def _takes_long(self, seconds: Array) -> NDArray[np.bool_]:
        """Which trials take more of the time budget than any may; where the shortest does, too, others that take little
        longer are no worse."""
        long = seconds / self._budget_seconds > ALLOWANCE_SHARE
        return np.asarray(long & (seconds > ALLOWANCE_FACTOR * seconds.min(initial=math.inf)))

    def _least_gain(self, methods: NDArray[np.str_], budget_share: Array) -> Array:
        """From which gain on each config is worth its trial, which takes this share of the time budget."""
        least_gain = np.full(len(methods), self.worthwhile_gain())
        if (doubtful := self._doubtful_method()) is not None:
            is_short = ALLOWANCE_FACTOR * budget_share <= ALLOWANCE_SHARE
            least_gain[is_short & (methods == doubtful)] = min(SMALL_GAIN, self.worthwhile_gain())
        return least_gain

    def _gains(
        self, rows: Rows, time: Mixture, memory: Array, seconds: Array, fronts: Mapping[str, Front]
    ) -> tuple[Array, Array, NDArray[np.bool_]]:
        """What each config may gain over the measured ones of its method, if it fits; the seconds by which that is
        judged; and which would finish what has been begun. `seconds`: of the trials."""
        gain, judged_seconds, finishing = np.zeros(len(rows)), seconds.copy(), np.zeros(len(rows), dtype=bool)
        methods, claims = self.belief.methods[rows], self.belief.claims(rows)
        least, limit = likeliest(claims), float(self._state.memory_limit_bytes)
        expected_time = np.maximum(time.together.mean, least)
        for method in np.unique(methods).tolist():
            of_method = np.flatnonzero(methods == method)
            front = self._front_to_beat(method, fronts)
            if front is None:
                # A cheaper trial is no reason to begin with it.
                judged_seconds[of_method] = np.maximum(seconds[of_method], np.median(seconds[of_method]))
                figures = time.part(of_method), least[of_method], memory[of_method]
                gain[of_method], begun = self._gain_of_first(method, expected_time[of_method], figures)
                if begun is not None:
                    finishing[of_method[begun]] = True
                continue
            for part, chance, claimed in _split_where_claims_differ(claims, of_method):
                figures = time.part(part), claimed[part], memory[part]
                gain[part] += chance * expected_gain(front, *figures, limit, area_weight=self._area_weight)
        return gain, judged_seconds, finishing

    def _gain_of_first(
        self, method: str, expected_time: Array, figures: tuple[Mixture, Array, Array]
    ) -> tuple[Array, int | None]:
        """What configs of a method of which nothing is measured may gain: the fastest that is likely to fit comes
        first. And, if one has been begun, which of them would finish that: where it would take long, what may be much
        faster comes before it is finished, which gains 5 %; of a method that is only shown beside the recommended one,
        that is not worth it."""
        speed = np.exp(-expected_time)
        bounds = [b for c, b in self._state.least_step_seconds.items() if c.text("method") == method]
        if not bounds:
            return 2.0 * speed / speed.max(), None
        begun, limit = Front.of([(0.0, min(bounds))]), float(self._state.memory_limit_bytes)
        faster = expected_gain(begun, *figures, limit, area_weight=0.0)
        return np.maximum(faster, 0.05 * speed / speed.max()), int(speed.argmax())

    def _recommended(
        self, fronts: Mapping[str, Front], methods: NDArray[np.str_], probability: Array, seconds: Array
    ) -> str | None:
        """The most faithful method that has fitted or still may, and is or may be practical (`frontier.practical`).
        Until something has fitted, it must be likely to, by its predicted memory; without predictions none is, and
        anything that fits is what the user needs. Later it may be as unlikely as what the search still tries: the gain
        of a config is at least its probability of fitting while nothing of its method has. `seconds`: the expected step
        time of each config."""
        if not fronts and not self.belief.memory.predicted.any():
            return None
        possible = probability >= (LARGE_GAIN if fronts else LIKELY_FIT)
        speeds: dict[str, float] = {}
        for method in self._faithful:
            measured = [1.0 / fronts[method].best_seconds] if method in fronts else []
            speeds[method] = max([*measured, *(1.0 / seconds[possible & (methods == method)]).tolist()], default=0.0)
        return practical({method: speed for method, speed in speeds.items() if speed})

    def _front_to_beat(self, method: str, fronts: Mapping[str, Front]) -> Front | None:
        """What a config of a method must beat: its frontier or, where nothing of that is practical beside the next less
        faithful method, what would be; None before anything of the method is measured."""
        front = fronts.get(method)
        if front is None or method not in self._faithful:
            return front
        least = least_practical_speed(method, {name: 1.0 / other.best_seconds for name, other in fronts.items()})
        return front if least * front.best_seconds <= 1.0 else Front.of([(0.0, 1.0 / least)])

    def _fronts(self) -> dict[str, Front]:
        """The frontier of each method that has one. What is under way and likely to fit counts as if measured as
        expected: what is suggested meanwhile should be worth its trial beside that."""
        points, rows = self._state.points(), np.sort(self.belief.rows(self._state.under_way))
        figures = [(p.method, float(p.measurement.device_bytes), p.measurement.step_seconds.median) for p in points]
        if len(rows):
            memory, probability = self.belief.memory.fit(rows)
            seconds, likely = np.exp(self.belief.step_time(rows).together.mean), probability >= LIKELY_FIT
            columns = (column[likely].tolist() for column in (self.belief.methods[rows], memory, seconds))
            figures += zip(*columns, strict=True)
        methods = {method for method, _, _ in figures}
        return {m: Front.of((memory, seconds) for method, memory, seconds in figures if method == m) for m in methods}


def _speed_beside(fronts: Mapping[str, Front], time: Mixture) -> Array:
    """The expected speed of configs as a share of the fastest that is measured, 1 at most: what is likely to be many
    times slower is no reason to begin with another method."""
    fastest = math.log(min(front.best_seconds for front in fronts.values()))
    return np.asarray(time.weights @ np.exp(np.minimum(fastest - time.mean, 0.0)))


def _split_where_claims_differ(
    claims: Sequence[tuple[float, Array]], positions: NDArray[np.intp]
) -> Iterator[tuple[NDArray[np.intp], float, Array]]:
    """The claims about `positions`: for which of them each counts, its chance, and the claim. Where both say the same,
    which is almost everywhere, there is one claim with certainty."""
    (first_chance, first), (second_chance, second) = claims
    agree = first[positions] == second[positions]
    yield positions[agree], 1.0, first
    if not agree.all():
        yield positions[~agree], first_chance, first
        yield positions[~agree], second_chance, second
