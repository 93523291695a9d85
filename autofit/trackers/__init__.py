"""Experiment trackers that trials are copied to: one file per tracker, and what each is told (`tracked_trial`)."""

from __future__ import annotations

from pathlib import Path

from autofit.core.distribution import install
from autofit.core.errors import EnvironmentLacks, unknown
from autofit.trackers.tracked_trial import Tracker

TRACKERS = ("mlflow", "wandb", "optuna")


def connect(name: str, file: Path) -> Tracker:
    """The tracker of this name; `file` is the journal of `optuna`, and the others say themselves where they are.

    Raises `UsageError` for an unknown name or no journal, and `EnvironmentLacks` for a package that is not installed.
    """
    try:
        if name == "mlflow":
            from autofit.trackers.mlflow_runs import MlflowRuns

            return MlflowRuns()
        if name == "wandb":
            from autofit.trackers.wandb_runs import WandbRuns

            return WandbRuns()
        if name == "optuna":
            from autofit.trackers.optuna_journal import OptunaJournal

            return OptunaJournal(file)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        remedy = install() if name == "optuna" else install("trackers")
        raise EnvironmentLacks(f"{name} is not installed here", remedy=remedy) from None
    raise unknown("tracker", name, TRACKERS)
