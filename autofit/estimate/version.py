"""Identifies which estimator made an estimate."""

from __future__ import annotations

from autofit.core.prediction import Prediction

ESTIMATOR_VERSION = 41
"""Incremented whenever a config's estimate changes: estimates stored before are then recomputed, and trials predicted
before teach nothing (`is_current`)."""


def is_current(prediction: Prediction) -> bool:
    """Whether this version made the prediction: only then do its errors say something about the next ones.

    Every trace counts work, which states the version; memory by formula has no work and counts as current.
    """
    if prediction.work is None:
        return prediction.memory_error > 0
    return prediction.work.estimator == ESTIMATOR_VERSION
