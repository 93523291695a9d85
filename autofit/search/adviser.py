"""The Optuna study as adviser: rebuilt from the store's trials, asked for configs, told every outcome."""

from __future__ import annotations

from collections.abc import Callable

import optuna
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from autofit.lattice import Config
from autofit.outcome import Fits, Trial
from autofit.search.knowledge import Knowledge
from autofit.search.sampler import Advice, Candidate, LatticeSampler, parameters
from autofit.workload import digest

OVER_LIMIT = "bytes_over_limit"
"""Name of the constraint: feasible where it is at most 0."""


class Adviser:
    """Chooses the next config. Two objectives: memory down, throughput up; not fitting is a violated constraint."""

    def __init__(self, knowledge: Knowledge, floor: Callable[[Config], int]) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._knowledge = knowledge
        self._advice = Advice(knowledge, floor)
        self._sampler = LatticeSampler(knowledge)
        # A study refuses changed categories under one name: the name says which space it is.
        name = "autofit-" + digest({k: repr(d) for k, d in self._sampler.space.items()})
        self.study = optuna.create_study(
            study_name=name,
            directions=[StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE],
            sampler=self._sampler,
        )
        self._asked: dict[Config, optuna.Trial] = {}

    def best_candidate(self) -> Candidate | None:
        """The open config with the highest expected gain; None if none is open."""
        candidates = self._advice.candidates()
        return candidates[0] if candidates else None

    def ask(self, candidate: Candidate) -> Config:
        """Take the candidate up: the study holds it as running until its outcome is told."""
        self._sampler.next = candidate.config
        trial = self.study.ask(self._sampler.space)
        self._asked[candidate.config] = trial
        self._knowledge.take(candidate.config)
        return candidate.config

    def tell(self, trial: Trial) -> int:
        """Tell an outcome; how many other configs it rules out. Trials from the store are told as if just run."""
        asked = self._asked.pop(trial.config, None)
        values = self._values(trial)
        if asked is None:
            self._add(trial, values)
        elif values is None:
            self.study.tell(asked, state=TrialState.FAIL)
        else:
            asked.set_constraint(OVER_LIMIT, values[2])
            self.study.tell(asked, values[:2])
        return self._knowledge.learn(trial)

    def _add(self, trial: Trial, values: tuple[float, float, float] | None) -> None:
        if values is None or trial.config not in set(self._knowledge.lattice.configs):
            return
        made = create_trial(
            params=parameters(trial.config, self._sampler.space),
            distributions=self._sampler.space,
            values=values[:2],
            constraints={OVER_LIMIT: values[2]},
        )
        self.study.add_trial(made)

    def _values(self, trial: Trial) -> tuple[float, float, float] | None:
        """(memory, tokens per second, bytes over the limit); None for an outcome that says nothing of either.

        Out of memory is told with finite worst values and a violated constraint: samplers that model values (GP)
        ignore pruned trials and would ask for the same region again.
        """
        limit = float(self._knowledge.memory_limit_bytes)
        if isinstance(trial.outcome, Fits):
            m = trial.outcome.measurement
            return float(m.device_bytes), m.tokens_per_second, m.device_bytes - limit
        if self._knowledge.does_not_fit(trial):
            return 2.0 * limit, 0.0, limit
        return None
