"""Trials as runs of Weights & Biases: a group per context, in the project `autofit` or WANDB_PROJECT."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read at import; its crashes would be reported to its makers

import wandb

from autofit.core.errors import EnvironmentLacks, UsageError, lines_of
from autofit.trackers.tracked_trial import PROJECT, TrackedTrial

_QUIET = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
    "x_graphql_retry_max": 20,
}
"""Nothing of the machine that copies the trials: they ran elsewhere, or earlier. The retries are W&B's own: fewer are
made before the first run, so that a server that is not there is soon said to be."""


class WandbRuns:
    """A `Tracker`. Where W&B is offline, what it has is what lies in its folder here."""

    def __init__(self) -> None:
        settings = wandb.setup(wandb.Settings(x_graphql_retry_max=3)).settings
        if settings.mode == "disabled":
            raise UsageError("WANDB_MODE is disabled: set it to online or offline")
        self._offline = settings.mode in ("offline", "dryrun")
        self._project, self._entity = settings.project or PROJECT, settings.entity
        self._folder, self._path = Path(settings.wandb_dir), "/".join(filter(None, (self._entity, self._project)))
        with self._reached():
            self._uids = self._known_uids()

    @property
    def place(self) -> str:
        return f"W&B at {self._folder} (offline)" if self._offline else f"W&B at {self._path}"

    @property
    def note(self) -> str | None:
        if not self._offline:
            return None
        return (
            f"`wandb sync {self._folder}/offline-run-*` uploads them. What the server has already is not known here; "
            "a trial's run id is always the same, so that it does not become two runs there"
        )

    def uids(self, trial: TrackedTrial) -> set[str]:
        return self._uids

    def add(self, trial: TrackedTrial) -> None:
        with self._reached():
            run = wandb.init(
                project=self._project,
                entity=self._entity,
                group=trial.context,
                id=trial.uid,
                name=trial.name,
                config={**trial.axes, **trial.setting},
                resume="never",
                reinit="create_new",
                settings=wandb.Settings(**_QUIET, x_start_time=trial.started.timestamp()),
            )
            run.summary.update({**trial.facts, **trial.metrics})
            run.finish(exit_code=0 if trial.fits else 1)

    def _known_uids(self) -> set[str]:
        if self._offline:
            return {folder.name.rpartition("-")[2] for folder in self._folder.glob("offline-run-*")}
        try:
            return {run.id for run in wandb.Api().runs(self._path)}
        except ValueError:  # no such project: the first run makes it
            return set()

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except wandb.Error as error:
            raise EnvironmentLacks(f"W&B: {lines_of(error)[0]}", remedy="wandb login, or WANDB_MODE=offline") from error
