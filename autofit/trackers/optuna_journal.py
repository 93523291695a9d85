"""Trials as a journal of Optuna, which optuna-dashboard opens: a study per context."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from autofit.core.errors import UsageError
from autofit.core.lattice import Value
from autofit.techniques import AXES
from autofit.trackers.tracked_trial import TrackedTrial

OBJECTIVES = {"device_bytes": StudyDirection.MINIMIZE, "tokens_per_second": StudyDirection.MAXIMIZE}
_ABSENT = "-"
"""Category of an axis that does not apply to a config, as in the search's own study."""
_NUMBERS = tuple(2**n for n in range(17))
_CHOICES: dict[str, tuple[Value, ...]] = {axis.name: (_ABSENT, *(axis.values or _NUMBERS)) for axis in AXES}
"""Every study has the same choices, so that later trials are compared with earlier ones."""


class OptunaJournal:
    """A `Tracker`."""

    def __init__(self, file: Path) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._file = file
        try:
            self._check()
            backend = JournalFileBackend(str(file), lock_obj=JournalFileOpenLock(str(file)))
            self._storage = JournalStorage(backend)
        except OSError as error:
            raise UsageError(f"{file} cannot be written: {error.strerror}") from error
        self._studies: dict[str, tuple[optuna.Study, set[str]]] = {}
        """By context: the study, and the trials that it has."""

    @property
    def place(self) -> str:
        return f"the journal {self._file}"

    @property
    def note(self) -> str:
        return f"`optuna-dashboard {self._file}` shows them"

    def uids(self, trial: TrackedTrial) -> set[str]:
        return self._study(trial)[1]

    def add(self, trial: TrackedTrial) -> None:
        """A trial without a measurement is a failed one: it has no values, and its attributes say why."""
        study, _ = self._study(trial)
        params: dict[str, Any] = dict.fromkeys(_CHOICES, _ABSENT) | trial.axes
        distributions: dict[str, BaseDistribution] = {}
        for name, value in params.items():
            choices = _CHOICES.get(name, ())
            distributions[name] = CategoricalDistribution(choices if value in choices else (*choices, value))
        metrics = trial.metrics
        study.add_trial(
            FrozenTrial(
                number=0,
                trial_id=0,
                state=TrialState.COMPLETE if trial.fits else TrialState.FAIL,
                value=None,
                values=[metrics[name] for name in OBJECTIVES] if trial.fits else None,
                datetime_start=trial.started,
                datetime_complete=trial.ended,
                params=params,
                distributions=distributions,
                user_attrs={**trial.facts, **metrics},
                system_attrs={},
                intermediate_values={},
            )
        )

    def _study(self, trial: TrackedTrial) -> tuple[optuna.Study, set[str]]:
        if trial.context not in self._studies:
            if trial.context in optuna.get_all_study_names(self._storage):
                study = optuna.load_study(study_name=trial.context, storage=self._storage)
            else:
                directions = list(OBJECTIVES.values())
                study = optuna.create_study(storage=self._storage, study_name=trial.context, directions=directions)
                with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
                    study.set_metric_names(list(OBJECTIVES))
                for name, values in trial.setting.items():
                    study.set_user_attr(name, values)
            uids = {trial.user_attrs.get("uid", "") for trial in study.get_trials(deepcopy=False)}
            self._studies[trial.context] = study, uids
        return self._studies[trial.context]

    def _check(self) -> None:
        """Raises `UsageError` for a file that is something else: a line would be added to it."""
        if not self._file.exists():
            return
        with self._file.open("rb") as lines:
            first_line = next(lines, None)
        try:
            is_foreign = first_line is not None and "op_code" not in json.loads(first_line)
        except (ValueError, TypeError):
            is_foreign = True
        if is_foreign:
            raise UsageError(f"{self._file} is no journal of Optuna: name another file")
