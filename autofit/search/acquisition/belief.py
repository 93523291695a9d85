"""What the trials say of a lattice: how long steps and trials take, and what bounds these."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from autofit.core.frontier import MAX_TIE, Point
from autofit.core.lattice import Config
from autofit.core.outcome import TimedOut
from autofit.core.workload import METHODS
from autofit.planning.plan import Plan
from autofit.prediction.predictions import Predictions
from autofit.search.acquisition.gains import regret_bound, timing_deviation
from autofit.search.acquisition.memory_fit import MemoryFit, guesses
from autofit.search.acquisition.step_times import Mixture, StepTimes, TimeObservation, time_error
from autofit.search.acquisition.surrogate import TIME, Array, Rows
from autofit.search.acquisition.trial_costs import TrialCosts
from autofit.search.lattice_state import LatticeState
from autofit.techniques import only_slower
from autofit.training.flops import least_token_seconds

ORDER_DOUBT = 0.05
"""Chance that what does all of another config's work and more is faster for all that, as far as no trial has shown it:
on a device that hands out memory slowly, recomputing activations may cost less than keeping them. The same chance as
that of the figures that a search states."""


class Belief:
    """About memory, step times and durations of trials, from the plan of a search and what is known of its lattice."""

    def __init__(self, plan: Plan, state: LatticeState) -> None:
        self._state = state
        self._row_of = plan.lattice.row_of
        self.methods = np.array([c.text("method") for c in plan.lattice.configs])
        """Of each config of the lattice."""
        least = {method: least_token_seconds(plan.job, full=method == "full") for method in METHODS}
        tokens = plan.job.workload.tokens_per_step
        self._floor = np.array([math.log(s * tokens) if (s := least[method]) else -math.inf for method in self.methods])
        """Logarithms of the seconds that a step takes at least, by what the device's arithmetic takes; minus infinity
        where that is unknown."""
        self._time = StepTimes(plan.lattice, TIME)
        self.memory = MemoryFit(state, plan.lower_bounds)
        self._costs = TrialCosts(plan)

    def use(self, predictions: Predictions) -> None:
        """See `Acquisition.use`."""
        lattice = self._state.lattice
        by_config = {c: predictions.by_config[c] for c in lattice.configs if c in predictions.by_config}
        if not by_config or 2 * len(self.memory.possible(by_config)) < len(self.memory.possible(lattice.configs)):
            return
        self.memory.use(by_config, predictions.memory_deviation)
        seconds = {c: math.log(p.step_seconds) for c, p in by_config.items() if p.step_seconds is not None}
        if 2 * len(seconds) >= len(by_config):
            errors = [1.0 if p.relative_error is None else p.relative_error for p in by_config.values()]
            times = seconds | {c: mean for c, (mean, _) in guesses(lattice, seconds, TIME).items()}
            self._time = StepTimes(lattice, time_error(float(np.median(errors))), times)
            self._costs.use(by_config)

    def rows(self, configs: Iterable[Config]) -> Rows:
        return np.fromiter((self._row_of[c] for c in configs), dtype=np.intp)

    def expected_seconds(self, config: Config) -> float:
        """Expected duration of the trial of a config of the lattice, set-up included."""
        rows = self.rows([config])
        return float(self.seconds(self.step_time(rows), rows)[0])

    def step_time(self, rows: Rows) -> Mixture:
        """The logarithm of seconds per step. One that is known only to be at least so long, where less was expected,
        counts as if measured there, with a deviation of 0.5."""
        measured = [
            TimeObservation(p.config, math.log(p.measurement.step_seconds.median), timing_deviation(p))
            for p in self._state.measured()
        ]
        bounds = [TimeObservation(c, math.log(b), 0.5) for c, b in self._state.least_step_seconds.items()]
        if bounds:
            expected = self._time.predict(measured, self.rows(b.config for b in bounds)).together.mean
            measured += [b for b, mean in zip(bounds, expected, strict=True) if b.logarithm > mean]
        return self._time.predict(measured, rows)

    def claims(self, rows: Rows, *, unlucky: float = 0.0) -> list[tuple[float, Array]]:
        """What is claimed of the seconds that a step of each config takes at least, each with its chance: their
        logarithms, minus infinity where there is no claim. The device's arithmetic takes as long, or a trial of the
        config has proven it without getting further; or, if the time order holds here, a measured config does part of
        its work and nothing else. By so many deviations of its timing the measured one may have been `unlucky`, and
        seemed slower than it is."""
        proven = self._floor.copy()
        for config, bound in self._state.proven_step_seconds.items():
            row = self._row_of[config]
            proven[row] = max(proven[row], math.log(bound))
        ordered = proven.copy()
        for point in self.bounding():
            slower = self.rows(c for c in only_slower(point.config) if c in self._row_of)
            luckier = math.log(point.measurement.step_seconds.median) - unlucky * timing_deviation(point)
            ordered[slower] = np.maximum(ordered[slower], luckier)
        doubt = self.order_doubt()
        return [(1.0 - doubt, ordered[rows]), (doubt, proven[rows])]

    def bounding(self) -> list[Point]:
        """The measured configs that bound those which do their work and more: not stopped early, which is too
        uncertain, and with 5 % of the limit to spare, as an allocator may spend time on making room closer to it."""
        room = 0.95 * self._state.memory_limit_bytes
        points = (p for p in self._state.points() if not p.measurement.stopped_early)
        return [p for p in points if p.measurement.device_bytes <= room]

    def order_doubt(self) -> float:
        """The chance that the time order does not hold here: certainty, once a trial has contradicted it by more than
        chance would, and by more than executions of one config differ."""
        measured = {p.config: p for p in self.bounding()}
        for point in measured.values():
            for slower in filter(None, map(measured.get, only_slower(point.config))):
                lead = math.log(point.measurement.step_seconds.median / slower.measurement.step_seconds.median)
                if lead > max(2.0 * math.hypot(timing_deviation(point), timing_deviation(slower)), MAX_TIE):
                    return 1.0
        return ORDER_DOUBT

    def seconds(self, time: Mixture, rows: Rows) -> Array:
        step_seconds = np.exp(np.maximum(time.together.mean, likeliest(self.claims(rows))))
        return self._costs.seconds(self._state.trials, rows, step_seconds)

    def regret_bound(self, winner: Point) -> float:
        """Upper bound, with 95 % confidence, on how much slower `winner` is than the best of its method, as a share
        of the best speed: open configs may fit and be faster, and measured ones may be faster than they seemed."""
        unmeasured = self.rows(self._may_be_faster())
        unmeasured = unmeasured[self.methods[unmeasured] == winner.method]
        measured = [p for p in self._state.points() if p.method == winner.method and p.config != winner.config]
        rivals = self.step_time(unmeasured).with_measured(
            [math.log(p.measurement.step_seconds.median) for p in measured], [timing_deviation(p) for p in measured]
        )
        probability = np.append(self.memory.fit(unmeasured)[1], np.ones(len(measured)))
        claims = [
            (chance, np.append(least, np.full(len(measured), -math.inf)))
            # A trial for a measured config that was so unlucky would seldom pay, but the bound allows for it.
            for chance, least in self.claims(unmeasured, unlucky=2.0)
        ]
        return regret_bound(winner, rivals, probability, claims)

    def _may_be_faster(self) -> list[Config]:
        """The open configs, and those that were given up because trials of them ended early: these show no more than
        that a step takes long, and the first micro-step alone not even that for certain."""
        trials = self._state.trials
        given_up = (c for c in self._state.least_step_seconds if c in trials)
        return [*self._state.open, *(c for c in given_up if isinstance(trials[c].outcome, TimedOut))]


def likeliest(claims: Sequence[tuple[float, Array]]) -> Array:
    return max(claims, key=lambda claim: claim[0])[1]
