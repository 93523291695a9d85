"""How the service is doing: what is stored, what waits, and how right its predictions are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from autofit.estimate.version import is_current
from autofit.store import QueueStatus, Store

LATEST = 200
"""How many of the latest predicted trials the predictions' error is the median of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Figures of one moment."""

    trials: Mapping[str, int]
    """Outcome -> number of trials."""
    queue: QueueStatus
    memory_error: float | None
    """Median of |measured / predicted - 1| over the latest trials that fitted and were traced by this version of the
    estimator; None if there are none."""
    time_error: float | None
    """The same of a step's seconds."""


def status(store: Store) -> Status:
    """Looks into the store. Raises `StoreError`."""
    memory, seconds = [], []
    for trial in store.predicted(latest=LATEST):
        said, measured = trial.prediction, trial.measurement
        if said is None or measured is None or said.memory_error > 0 or not is_current(said):
            continue  # what a formula or another version of the estimator said
        memory.append(abs(measured.device_bytes / max(said.device_bytes, 1) - 1))
        if said.step_seconds:
            seconds.append(abs(measured.step_seconds.median / said.step_seconds - 1))
    return Status(
        trials=store.outcomes(),
        queue=store.queue.status(),
        memory_error=statistics.median(memory) if memory else None,
        time_error=statistics.median(seconds) if seconds else None,
    )
