"""Copies of the store's trials in the experiment tracker that a team uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autofit.core.errors import NotMeasured, unknown
from autofit.operations.recommendation import find_hardware
from autofit.store import Store
from autofit.trackers import connect
from autofit.trackers.tracked_trial import TrackedTrial

JOURNAL = Path("autofit-journal.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """What was copied, and where to."""

    place: str
    """The tracker, and where it keeps the trials."""
    trials: int
    """All that were asked for."""
    added: int
    """Those that the tracker did not have."""
    note: str | None
    """What to do or to know next."""


def track(
    to: str,
    *,
    model: str | None = None,
    hardware: str | None = None,
    out: Path = JOURNAL,
    store: Store,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Tracked:
    """Copies trials to `mlflow`, to `wandb`, or to the journal `out` of `optuna`: those that are not there yet.

    `model` and `hardware` None stand for all. `report` is called with how many trials are done, and how many there are.
    Raises `UsageError`, `NotMeasured` without a trial, and `EnvironmentLacks` for a tracker that cannot be used now.
    """
    models = dict.fromkeys(workload.model for workload in store.workloads())
    if model is not None and model not in models:
        raise unknown("model with measurements", model, models)
    on = None if hardware is None else find_hardware(hardware, store).key
    trials = store.trials(model=model, hardware_key=on)
    if not trials:
        raise NotMeasured("nothing has been measured yet", remedy="run a search first")
    tracker, added = connect(to, out), 0
    for done, told in enumerate(map(TrackedTrial, trials), start=1):
        uids = tracker.uids(told)
        if told.uid not in uids:
            tracker.add(told)
            uids.add(told.uid)
            added += 1
        report(done, len(trials))
    return Tracked(place=tracker.place, trials=len(trials), added=added, note=tracker.note)
