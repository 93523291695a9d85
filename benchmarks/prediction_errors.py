"""How far predictions were from trials, and how often fit was misjudged: by hardware, method and axis value."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from autofit.core.lattice import Config, Value
from autofit.core.outcome import Fits, Trial
from autofit.estimate.version import is_current
from autofit.techniques import AXES

SIZES = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
QUANTITIES = (*SIZES, "step_seconds", "step_seconds_uncalibrated")
"""Times calibrated on measured trials are kept apart from guesses based on data sheets."""
ALL = "all"
"""The group of all trials on one hardware."""
_AXES = {axis.name: (place, axis) for place, axis in enumerate(AXES)}


def groups(trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """For each hardware, all its trials and those with each value of each axis: their `errors` and `fit`. Trials count
    that this version of the estimator has predicted, and that trained or ran out of the device's memory."""
    members: dict[tuple[str, str, Value], list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.prediction is None or not is_current(trial.prediction):
            continue
        if trial.measurement is None and not trial.ran_out_on_device:
            continue  # the outcome does not show whether the config fits the device
        for axis, value in ((ALL, ALL), *trial.config.items):
            members[trial.hardware.name, axis, value].append(trial)
    in_order = sorted(members, key=lambda group: (group[0], _place(*group[1:])))
    return [
        {
            "hardware": hardware,
            "technique": axis if axis == ALL else str(Config.of({axis: value})),
            "errors": distributions(members[hardware, axis, value]),
            "fit": fit(members[hardware, axis, value]),
        }
        for hardware, axis, value in in_order
    ]


def errors(trial: Trial) -> dict[str, float]:
    """Predicted over measured, minus one, of each quantity that the trial has both predicted and measured: positive
    errors are overestimates."""
    predicted, measured = trial.prediction, trial.measurement
    if predicted is None or measured is None:
        return {}
    time = "step_seconds" if predicted.calibrated_on else "step_seconds_uncalibrated"
    pairs = {size: (getattr(predicted, size), getattr(measured, size)) for size in SIZES}
    pairs[time] = predicted.step_seconds, measured.step_seconds.median
    return {name: said / shown - 1.0 for name, (said, shown) in pairs.items() if said is not None and shown > 0}


def distributions(trials: Sequence[Trial]) -> dict[str, dict[str, float]]:
    """The distribution of each quantity's errors; without quantities that no trial has both predicted and measured."""
    by_trial = [errors(trial) for trial in trials]
    values = {name: [found[name] for found in by_trial if name in found] for name in QUANTITIES}
    return {name: distribution(found) for name, found in values.items() if found}


def distribution(found: Sequence[float]) -> dict[str, float]:
    """Of at least one error. The 95th percentile is by nearest rank; the worst, farthest from zero, has its sign."""
    sizes = sorted(map(abs, found))
    return {
        "count": len(found),
        "median": statistics.median(found),
        "median_absolute": statistics.median(sizes),
        "p95_absolute": sizes[math.ceil(0.95 * len(sizes)) - 1],
        "worst": max(found, key=abs),
    }


def fit(trials: Sequence[Trial]) -> dict[str, int]:
    """How often a prediction was wrong about whether a config fits its trial's limit: `too_hopeful` where it ran out of
    memory unforeseen, `too_careful` where it fitted unforeseen."""
    pairs = [(t.prediction.fits(t.memory_limit_bytes), isinstance(t.outcome, Fits)) for t in trials if t.prediction]
    hopeful, careful = pairs.count((True, False)), pairs.count((False, True))
    return {"judged": len(pairs), "too_hopeful": hopeful, "too_careful": careful, "misjudged": hopeful + careful}


def _place(axis: str, value: Value) -> tuple[int, str, int, str]:
    """A group's sort key: `all` first, then axes and values in their own order, then those that are not known here."""
    if axis not in _AXES:
        return (-1 if axis == ALL else len(_AXES), axis, 0, str(value))
    place, definition = _AXES[axis]
    return (place, axis, definition.place(value), str(value))
