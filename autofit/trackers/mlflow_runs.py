"""Trials as runs of MLflow: an experiment per context, in the server or database that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

# Read at import. It would report this use to its makers, and wait four minutes for a server that is not there.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from autofit.core.errors import EnvironmentLacks, lines_of
from autofit.trackers.tracked_trial import TrackedTrial

_UID = "autofit.uid"


class MlflowRuns:
    """A `Tracker`."""

    note = None

    def __init__(self) -> None:
        self._uri = mlflow.get_tracking_uri()
        with self._reached():
            self._client = mlflow.MlflowClient()
        self._experiments: dict[str, tuple[str, set[str]]] = {}
        """By context: the experiment's id, and the trials that it has."""

    @property
    def place(self) -> str:
        return f"MLflow at {_without_password(self._uri)}"

    def uids(self, trial: TrackedTrial) -> set[str]:
        return self._experiment(trial)[1]

    def add(self, trial: TrackedTrial) -> None:
        experiment, _ = self._experiment(trial)
        setting = {f"{part}/{name}": v for part, values in trial.setting.items() for name, v in values.items()}
        tags = {**{f"autofit.{name}": v for name, v in trial.facts.items()}, **setting}
        begun, ended = (round(at.timestamp() * 1000) for at in (trial.started, trial.ended))  # milliseconds
        with self._reached():
            run = self._client.create_run(experiment, start_time=begun, run_name=trial.name).info.run_id
            try:
                self._client.log_batch(
                    run,
                    metrics=[Metric(name, value, ended, 0) for name, value in trial.metrics.items()],
                    params=[Param(name, str(value)) for name, value in trial.axes.items()],
                    tags=[RunTag(name, str(value)[:4000]) for name, value in tags.items()],  # MLflow takes 5000 or more
                )
                self._client.set_terminated(run, "FINISHED" if trial.fits else "FAILED", end_time=ended)
            except BaseException:
                self._client.delete_run(run)  # half a run
                raise

    def _experiment(self, trial: TrackedTrial) -> tuple[str, set[str]]:
        if trial.context not in self._experiments:
            with self._reached():
                experiment = self._client.get_experiment_by_name(trial.context)
                if experiment is not None and experiment.lifecycle_stage == "deleted":
                    reason = f"{self.place}: the experiment {trial.context!r} was deleted, and still has its name"
                    raise EnvironmentLacks(reason, remedy=f"mlflow experiments restore -x {experiment.experiment_id}")
                number = experiment.experiment_id if experiment else self._client.create_experiment(trial.context)
                self._experiments[trial.context] = number, set(self._ended_uids(number))
        return self._experiments[trial.context]

    def _ended_uids(self, experiment: str) -> Iterator[str]:
        token: str | None = None
        while token != "":
            has_ended = "attributes.status != 'RUNNING'"
            page = self._client.search_runs([experiment], filter_string=has_ended, page_token=token)
            yield from (run.data.tags[_UID] for run in page if _UID in run.data.tags)
            token = page.token or ""

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except MlflowException as error:
            message = _without_password(lines_of(error)[0])
            raise EnvironmentLacks(f"{self.place}: {message}", remedy="set MLFLOW_TRACKING_URI to yours") from error


def _without_password(text: str) -> str:
    return re.sub(r"//\S*@", "//", text)
