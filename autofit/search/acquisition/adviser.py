"""The Optuna study as adviser: rebuilt from the store's trials, asked for configs, told every outcome.

Optuna holds the search as an ask-and-tell study with two objectives and a constraint. It keeps which trials are under
way, what each has shown and which are feasible. The study is in memory only, and what it was told is not read
back: the frontier comes from `LatticeState`, and what outlives the search is in the store.

The suggestions are our own, from a sampler that plugs into Optuna (`LatticeSampler`). Optuna's samplers know neither
the lattice's order (what one failure rules out), nor the memory floor, nor that a trial costs seconds or minutes, and
they ask for configs that are invalid or already measured: of 40 suggestions over 192 configs, TPE's were 31 to 36
distinct ones, GPSampler's 15 to 40, depending on how failures were told.
"""

from __future__ import annotations

import optuna
from optuna.trial import TrialState, create_trial

from autofit.core.lattice import Config
from autofit.core.outcome import OutOfMemory, Trial
from autofit.core.workload import digest
from autofit.search.acquisition.acquisition import Acquisition
from autofit.search.acquisition.sampler import DIRECTIONS, LatticeSampler, parameters, suggested
from autofit.search.lattice_state import LatticeState

OVER_LIMIT = "bytes_over_limit"
"""Name of the constraint: feasible where it is at most 0."""


class Adviser:
    """Chooses the next config. Two objectives: memory down, throughput up; not fitting is a violated constraint."""

    def __init__(self, state: LatticeState, acquisition: Acquisition) -> None:
        """`acquisition` must be based on the same state."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._state = state
        self.acquisition = acquisition
        self._sampler = LatticeSampler(state, acquisition)
        # A study refuses changed categories under the same name, so the name identifies the space.
        name = "autofit-" + digest({k: repr(d) for k, d in self._sampler.space.items()})
        self.study = optuna.create_study(study_name=name, directions=DIRECTIONS, sampler=self._sampler)
        self._running: dict[Config, optuna.Trial] = {}

    def ask(self, seconds_left: float | None = None) -> Config:
        """The config to run next: the study holds it as running until its outcome is told.

        Raises `ValueError` if no config is open.
        """
        self._sampler.check_open()  # Optuna does not consult the sampler if every axis has one value
        self._sampler.seconds_left = seconds_left
        trial = self.study.ask(self._sampler.space)
        config = suggested(trial.params)
        self._state.take(config)
        self._running[config] = trial
        return config

    def tell(self, trial: Trial) -> None:
        """Tell an outcome. Stored trials are told as if just run."""
        self._state.learn(trial)
        self._tell_study(trial)

    def recall(self, trial: Trial, attempts: list[Trial]) -> None:
        """`tell` for the stored trial that settles its config, which is one of several attempts."""
        self._tell_study(trial)
        self._state.recall(trial, attempts)

    def give_up(self, config: Config) -> None:
        """Give up on `config`, which was asked for: no outcome of it will be told, and it is open again."""
        self._state.give_back(config)
        running = self._running.pop(config, None)
        if running is not None:
            self.study.tell(running, state=TrialState.FAIL)

    def _tell_study(self, trial: Trial) -> None:
        values = self._values(trial)
        if values is None:
            self.give_up(trial.config)
            return
        memory, speed, over_limit = values
        running = self._running.pop(trial.config, None)
        if running is not None:
            running.set_constraint(OVER_LIMIT, over_limit)
            self.study.tell(running, (memory, speed))
        elif trial.config in self._state:
            stored = create_trial(
                params=parameters(trial.config, self._sampler.space),
                distributions=self._sampler.space,
                values=(memory, speed),
                constraints={OVER_LIMIT: over_limit},
            )
            self.study.add_trial(stored)

    def _values(self, trial: Trial) -> tuple[float, float, float] | None:
        """(memory, tokens per second, bytes over the limit); None for an outcome that says nothing about them.

        Out of memory is told as finite worst values and a violated constraint: samplers that model values (GP) ignore
        pruned trials and would ask for the same region again.
        """
        limit = float(self._state.memory_limit_bytes)
        if m := trial.measurement:
            return float(m.device_bytes), m.tokens_per_second, m.device_bytes - limit
        if isinstance(trial.outcome, OutOfMemory):
            return 2.0 * limit, 0.0, limit
        return None
