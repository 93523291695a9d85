"""What a search knows about each config: measured, ruled out, or open."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autofit.core.frontier import Point, dominates, point
from autofit.core.lattice import Config, Lattice
from autofit.core.outcome import DEADLINE_SECONDS, OutOfMemory, TimedOut, Trial
from autofit.core.verdict import contradiction, verdict
from autofit.planning.plan import Plan
from autofit.trial.measure.pace import UNSTEADY


def answers(
    trials_by_config: Mapping[Config, Sequence[Trial]],
    lattice: Lattice,
    memory_limit_bytes: int,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> dict[Config, Trial]:
    """The stored trials that settle configs of the lattice, in its order.

    A trial that was stopped early settles its config only together with one that beats it: what beat it when it ran may
    be outside this search's goal, or count as a failure by now.
    """
    settling = {
        config: trial
        for config in lattice.configs
        if (trial := verdict(trials_by_config.get(config, ()), memory_limit_bytes, deadline_seconds)) is not None
    }
    full = [p for p in map(point, settling.values()) if p is not None and not p.measurement.stopped_early]
    full = [p for p in full if p.measurement.device_bytes <= memory_limit_bytes]
    return {config: trial for config, trial in settling.items() if not _lost_its_rival(trial, full)}


def _lost_its_rival(trial: Trial, full: Iterable[Point]) -> bool:
    stopped = point(trial)
    if stopped is None or not stopped.measurement.stopped_early:
        return False
    return not any(p.method == stopped.method and dominates(p, stopped) for p in full)


@dataclass(frozen=True, slots=True)
class _Rulings:
    """What trials say of configs that have none."""

    out: dict[Config, str]
    """Configs that need not run, each with its reason."""
    fits: set[Config]
    """Configs that are sure to fit."""
    open: dict[Config, None]
    """Configs that are neither measured, under way nor ruled out; in the lattice's order."""


class LatticeState:
    """What is known of every config of a lattice under one memory limit: what was shown is kept, and what follows from
    it for other configs is derived anew after each change.

    Observation counts more than inference. A config that fits refutes the rulings of every lighter one that ran out of
    memory, whatever the cause (a claim of the order that does not hold here, memory held by others), and a trial that
    ran out rules out nothing if something above it has fitted.
    """

    def __init__(self, lattice: Lattice, memory_limit_bytes: int) -> None:
        self.lattice = lattice
        self.memory_limit_bytes = memory_limit_bytes
        self.trials: dict[Config, Trial] = {}
        """The trial that settles each config that has one."""
        self.under_way: set[Config] = set()
        """Configs that were taken and whose outcome has not been learnt yet."""
        self.least_step_seconds: dict[Config, float] = {}
        """Lower bounds on the step of configs whose trials ended before they could measure it."""
        self.proven_step_seconds: dict[Config, float] = {}
        """Those of them that are beyond doubt (`TimedOut.is_proven`)."""
        self.between = 0.0
        """`repeatability.between_executions` of the hardware."""
        self.version = 0
        """Rises with every change."""
        self._not_worth: dict[Config, str] = {}
        """Configs that `rule_out` was told of, each with the reason."""
        self._attempts: defaultdict[Config, list[Trial]] = defaultdict(list)
        """The trials of each config but those that left it open, oldest first."""
        self._bounding: defaultdict[Config, list[Trial]] = defaultdict(list)
        """The trials of each config that a bound on its step may come from."""
        self._ended_early: Counter[Config] = Counter()
        """How many trials of each config have ended early."""
        self._above = lru_cache(maxsize=None)(lattice.above)
        self._below = lru_cache(maxsize=None)(lambda config: frozenset(lattice.below(config)))
        self._rulings_of = lru_cache(maxsize=1)(self._derive)

    @classmethod
    def of(cls, plan: Plan) -> LatticeState:
        """The state before any trial: configs whose lower bound exceeds the limit are ruled out."""
        state, limit = cls(plan.lattice, plan.limits.memory_bytes), plan.limits.memory_bytes
        too_large = {config: least for config, least in plan.lower_bounds.items() if least > limit}
        state.rule_out({c: f"weights, gradients and states alone take {least} bytes" for c, least in too_large.items()})
        return state

    def __contains__(self, config: Config) -> bool:
        return config in self.lattice.row_of

    @property
    def open(self) -> tuple[Config, ...]:
        """Configs that are neither measured, under way nor ruled out, in the lattice's order."""
        return tuple(self._rulings.open)

    @property
    def ruled_out(self) -> Mapping[Config, str]:
        """Configs that need not run, each with its reason."""
        return self._rulings.out

    @property
    def _rulings(self) -> _Rulings:
        return self._rulings_of(self.version)

    def is_below_a_fit(self, config: Config) -> bool:
        """Whether `config` is sure to fit: it needs no more memory than one that has fitted, and no trial contradicts
        that."""
        return config in self._rulings.fits

    def take(self, config: Config) -> None:
        if config in self._rulings.open:
            self.under_way.add(config)
            self.version += 1

    def give_back(self, config: Config) -> None:
        """Mark `config` as no longer under way, if it was: nothing has been learnt of it."""
        if config in self.under_way:
            self.under_way.remove(config)
            self.version += 1

    def recall(self, trial: Trial, attempts: Iterable[Trial]) -> None:
        """`learn` for the stored trial that settles its config, which is one of several attempts."""
        config, stored = trial.config, list(attempts)
        self._attempts[config] = stored if trial in stored else [*stored, trial]
        self._count_as(trial)

    def learn(self, trial: Trial) -> None:
        """Add an outcome.

        A trial that fitted, that was not given the time to end, or whose time is in doubt counts as what it means
        together with earlier ones of its config (`core.verdict`).
        """
        config = trial.config
        self.recall_bounds([trial])
        counts = trial.why_set_aside is None
        self._ended_early[config] += counts and trial.least_step_seconds is not None
        if not counts or self._is_open_again(trial):
            self.give_back(config)
            return
        self._attempts[config].append(trial)
        together = None
        if self._fits(trial) or trial.doubts or isinstance(trial.outcome, TimedOut):
            together = verdict(self._attempts[config], self.memory_limit_bytes)
        self._count_as(together or trial)

    def set_aside(self, trial: Trial, reason: str) -> None:
        """Forget what a trial has shown of time: its device has turned out not to be what it is called. Its config is
        what its other trials show, or open again."""
        config, attempts = trial.config, self._attempts[trial.config]
        attempts[:] = [t.set_aside(reason) if t is trial else t for t in attempts]
        was_settled = self.trials.get(config) is trial
        if was_settled:
            del self.trials[config]
        bounding = [t for t in self._bounding[config] if t is not trial]
        self._ended_early[config] -= len(bounding) < len(self._bounding[config])
        self._bounding[config] = bounding
        for bounds in (self.least_step_seconds, self.proven_step_seconds):
            bounds.pop(config, None)
        self._bound(bounding)
        self.version += 1
        if not was_settled:
            return
        if (others := verdict(attempts, self.memory_limit_bytes)) is not None:
            self._count_as(others)
        if self._fits(trial):
            self._forget_without_rival()

    def recall_bounds(self, trials: Iterable[Trial]) -> None:
        """Learn what trials that ended early show of their configs' steps, whatever else they show, unless these have
        been measured. One whose time is in doubt proves nothing; but what it shows counts where it is all that a busy
        machine lets anybody see."""
        for trial in trials:
            if trial.why_set_aside is None and trial.least_step_seconds is not None:
                self._bounding[trial.config].append(trial)
                self._bound([trial])

    def _bound(self, trials: Iterable[Trial]) -> None:
        for trial in trials:
            settled = self.trials.get(trial.config)
            if settled is not None and self._fits(settled):
                continue
            for bounds, bound in (
                (self.least_step_seconds, trial.least_step_seconds),
                (self.proven_step_seconds, None if trial.doubts else trial.proven_step_seconds),
            ):
                if bound is not None and trial.config in self:
                    bounds[trial.config] = max(bound, bounds.get(trial.config, 0.0))
                    self.version += 1

    def _is_open_again(self, trial: Trial) -> bool:
        """Whether a trial that ended early leaves its config open: nothing is known to be as fast as it may yet be, and
        it is the first such trial of the config, as a second would end early for the same reason. One whose later
        micro-steps have not earned it more time beside a measured rival is slower than that."""
        least, config = trial.least_step_seconds, trial.config
        if least is None or config not in self.under_way or self._ended_early[config] >= 2:
            return False
        if trial.proven_step_seconds is not None and not trial.doubts:
            least /= UNSTEADY  # what the micro-steps really took
        return least < self._best_seconds(config.text("method"))

    def _best_seconds(self, method: str) -> float:
        """Seconds of the fastest step of a method that fits; infinite if none does."""
        return min((p.measurement.step_seconds.median for p in self.points() if p.method == method), default=math.inf)

    def _count_as(self, trial: Trial) -> None:
        config = trial.config
        self.version += 1
        self.under_way.discard(config)
        self._not_worth.pop(config, None)
        earlier = self.trials.get(config)
        self.trials[config] = trial
        if earlier is not None and self._fits(earlier) and not self._fits(trial):
            self._forget_without_rival()
        if self._fits(trial):
            self.least_step_seconds.pop(config, None)  # what was measured counts, and no longer a bound
            self.proven_step_seconds.pop(config, None)

    def executions_differ(self, between: float) -> None:
        if between != self.between:
            self.between = between
            self.version += 1

    def rule_out(self, reasons: Mapping[Config, str]) -> list[Config]:
        """Mark configs as not worth running, each for its reason; returns those that were open: the others stay what
        they are."""
        were_open = [config for config in reasons if config in self._rulings.open]
        if were_open:
            self._not_worth |= {config: reasons[config] for config in were_open}
            self.version += 1
        return were_open

    def does_not_fit(self, trial: Trial) -> bool:
        """Whether the trial shows that its config needs more than the limit."""
        if isinstance(trial.outcome, OutOfMemory):
            return True
        return trial.measurement is not None and not trial.fits_within(self.memory_limit_bytes)

    def measured(self) -> list[Point]:
        """Every config that has trained, including beyond the limit, in the order learnt."""
        settled = ((c, t) for c, t in self.trials.items() if c in self)
        points = (point(trial, self.runs(config), self.between) for config, trial in settled)
        return [p for p in points if p is not None]

    def runs(self, config: Config) -> int:
        """How often a config has fitted and was timed in full."""
        return sum(trial.timed_in_full for trial in self._attempts.get(config, ()))

    def points(self) -> list[Point]:
        """Every config that fits the limit, in the order learnt."""
        return [p for p in self.measured() if p.measurement.device_bytes <= self.memory_limit_bytes]

    def fastest(self, methods: Iterable[str]) -> dict[str, Point]:
        """The fastest config that fits of each of `methods`, in their order; a method that has none is left out."""
        ordered = sorted(self.points(), key=lambda p: p.measurement.tokens_per_second)
        by_method = {p.method: p for p in ordered}
        return {method: by_method[method] for method in methods if method in by_method}

    @property
    def out_of_memory(self) -> int:
        """How many configs were measured not to fit."""
        return sum(1 for trial in self.trials.values() if self.does_not_fit(trial))

    @property
    def contradictory(self) -> int:
        """How many configs of the lattice have trials that contradict each other: they count as out of memory."""
        attempts_lists = (attempts for config, attempts in self._attempts.items() if config in self)
        return sum(contradiction(attempts, self.memory_limit_bytes) is not None for attempts in attempts_lists)

    def _fits(self, trial: Trial) -> bool:
        return trial.fits_within(self.memory_limit_bytes)

    def _rules_out(self, trial: Trial) -> bool:
        """Whether configs above this one cannot fit either. The order is one of device memory: running out of host
        memory, and processes that died for whatever reason, say nothing about other configs unless the host is the
        device."""
        if not self.does_not_fit(trial):
            return False
        outcome = trial.outcome
        of_host = isinstance(outcome, OutOfMemory) and (outcome.host or outcome.signal is not None)
        return not of_host or trial.hardware.kind == "cpu"

    def _derive(self, version: int) -> _Rulings:
        """What follows from all that is known; `version` is that of this state."""
        fitted = [config for config, trial in self.trials.items() if self._fits(trial)]
        rulers = [config for config, trial in self.trials.items() if self._rules_out(trial)]
        # If some of what needs no more than a fitting config ran out all the same, the order is wrong there.
        fits = set[Config]().union(*(self._below(c) for c in fitted if self._below(c).isdisjoint(rulers)))
        out, refuted = dict(self._not_worth), set[Config]().union(*map(self._below, fitted))
        for ruler in rulers:
            if ruler not in refuted:
                reason = f"needs at least the memory of a config that ran out ({ruler})"
                out |= {config: reason for config in self._above(ruler) if config not in out}
        settled = self.trials.keys() | self.under_way
        out = {config: reason for config, reason in out.items() if config not in settled}
        return _Rulings(out, fits, {c: None for c in self.lattice.configs if c not in settled and c not in out})

    def _forget_without_rival(self) -> None:
        """Forget the trials that were stopped early because of one that has failed since: their configs are open."""
        full = [p for p in self.points() if not p.measurement.stopped_early]

        def lacks_rival(config: Config, trial: Trial) -> bool:
            least = trial.least_step_seconds
            if least is None:
                return _lost_its_rival(trial, full)
            may_run_again = self._ended_early[config] < 2
            return may_run_again and least < self._best_seconds(config.text("method"))

        for config in [c for c, t in self.trials.items() if c in self and lacks_rival(c, t)]:
            del self.trials[config]
            self.version += 1
