"""How far the latest predictions were from measurements: what a server's metrics say of them."""

from __future__ import annotations

import statistics

from autofit.estimate.version import is_current
from autofit.store import Store

LATEST = 200
"""How many of the latest predicted trials `prediction_errors` are the medians of."""


def prediction_errors(store: Store) -> dict[str, float]:
    """Median of |measured / predicted - 1| of `memory` and of `step_seconds`, over the latest trials that fitted and
    were traced by this version of the estimator; without those of which there are none. Raises `StoreError`."""
    memory, seconds = [], []
    for trial in store.predicted(latest=LATEST):
        predicted, measured = trial.prediction, trial.measurement
        if predicted is None or measured is None or predicted.memory_error > 0 or not is_current(predicted):
            continue  # what a formula or another version of the estimator said
        memory.append(abs(measured.device_bytes / max(predicted.device_bytes, 1) - 1))
        if predicted.step_seconds:
            seconds.append(abs(measured.step_seconds.median / predicted.step_seconds - 1))
    errors = {"memory": memory, "step_seconds": seconds}
    return {figure: statistics.median(values) for figure, values in errors.items() if values}
