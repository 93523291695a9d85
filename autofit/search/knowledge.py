"""What a search knows about each config: measured, ruled out, or open."""

from __future__ import annotations

from collections.abc import Iterable

from autofit.frontier import Point
from autofit.lattice import Config, Lattice
from autofit.outcome import Fits, OutOfMemory, Trial


def verdict(trials: Iterable[Trial], memory_limit_bytes: int) -> Trial | None:
    """The stored trial that answers for a config under a limit; None if it must be run.

    A trial that fitted under any limit answers for every limit that holds its memory. One that ran out of memory
    answers for every limit that is no higher than its own. What was measured last counts. A crash, a time-out or a
    divergence answers for its own limit only.
    """
    for trial in reversed(list(trials)):
        outcome = trial.outcome
        if isinstance(outcome, Fits):
            if outcome.measurement.device_bytes <= memory_limit_bytes:
                return trial
            if outcome.measurement.peak_allocated_bytes > memory_limit_bytes:
                return trial
        elif isinstance(outcome, OutOfMemory):
            if trial.memory_limit_bytes >= memory_limit_bytes:
                return trial
        elif trial.memory_limit_bytes == memory_limit_bytes:
            return trial
    return None


class Knowledge:
    """The state of every config of a lattice under one memory limit."""

    def __init__(self, lattice: Lattice, memory_limit_bytes: int) -> None:
        self.lattice = lattice
        self.memory_limit_bytes = memory_limit_bytes
        self.trials: dict[Config, Trial] = {}
        """The answering trial of each config that has one."""
        self.ruled_out: dict[Config, str] = {}
        """Configs that need not run, each with its reason."""
        self._open = dict.fromkeys(lattice.configs)
        self._members = frozenset(lattice.configs)

    @property
    def open(self) -> tuple[Config, ...]:
        """Configs that are neither measured, under way nor ruled out."""
        return tuple(self._open)

    def take(self, config: Config) -> None:
        """`config` is under way."""
        self._open.pop(config, None)

    def learn(self, trial: Trial) -> int:
        """Add an outcome; how many other configs it rules out."""
        self._open.pop(trial.config, None)
        self.ruled_out.pop(trial.config, None)  # what was seen counts more than what was concluded
        self.trials[trial.config] = trial
        if not self.does_not_fit(trial):
            return 0
        return sum(
            self.rule_out(c, f"needs at least the memory of a config that ran out ({trial.config})")
            for c in self.lattice.above(trial.config)
        )

    def rule_out(self, config: Config, reason: str) -> bool:
        """Mark an open config as not worth running; whether it was open."""
        if config not in self._open:
            return False
        del self._open[config]
        self.ruled_out[config] = reason
        return True

    def does_not_fit(self, trial: Trial) -> bool:
        """Whether the trial shows that its config needs more than the limit."""
        if isinstance(trial.outcome, OutOfMemory):
            return True
        return isinstance(trial.outcome, Fits) and trial.outcome.measurement.device_bytes > self.memory_limit_bytes

    def points(self) -> list[Point]:
        """Every config that fits the limit, in the order learnt."""
        return [
            Point(config=config, measurement=trial.outcome.measurement, trial_id=trial.trial_id)
            for config, trial in self.trials.items()
            if isinstance(trial.outcome, Fits) and not self.does_not_fit(trial) and config in self._members
        ]

    @property
    def out_of_memory(self) -> int:
        """Configs that were measured not to fit."""
        return sum(1 for trial in self.trials.values() if self.does_not_fit(trial))
