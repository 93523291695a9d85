"""How far off predicted memory is, as shown by trials on the hardware."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean, pvariance

from autofit.core.normal import mean_above
from autofit.core.outcome import Trial
from autofit.estimate.memory.deviation import NOTHING_COMPARED, MemoryDeviation
from autofit.estimate.version import is_current

COMPARED = 1000
"""Number of trials, the latest ones, whose predictions are compared with their outcomes; more would add nothing."""
WORTH = 3.0
"""How many comparisons the deviation is worth that is assumed without any, and how many of a search's own comparisons
all earlier ones together are worth."""
LEAST = 0.01
"""Deviation below which no number of comparisons takes it: two runs of one config differ by that much."""


def learned(trials: Iterable[Trial], unseen: MemoryDeviation = NOTHING_COMPARED) -> MemoryDeviation:
    """The memory error to expect, from trials with predictions on the same hardware, of any workload; `unseen` is what
    is assumed without any."""
    errors = memory_errors(trials, unseen.deviation)
    mean, deviation = normal_of(errors, unseen.deviation)
    return MemoryDeviation(mean=mean, deviation=max(deviation, LEAST), compared_on=len(errors))


def memory_errors(trials: Iterable[Trial], unseen: float) -> list[float]:
    """The logarithm of measured over predicted memory of each trial whose prediction this version traced.

    For a trial that ran out of memory, its limit gives only a lower bound: it counts as what is to be expected above
    that bound, and not at all where it was to be expected to run out.
    """
    errors, ran_out = [], []
    for trial in trials:
        prediction = trial.prediction
        if prediction is None or prediction.device_bytes <= 0 or not is_current(prediction):
            continue
        if prediction.memory_error > 0:
            continue  # a formula's error says nothing about that of traces
        predicted = math.log(prediction.device_bytes)
        if measured := trial.measurement:
            if measured.device_bytes > 0:  # on the CPU a tiny model may take none beyond the imports
                errors.append(math.log(measured.device_bytes) - predicted)
        elif trial.ran_out_on_device:
            ran_out.append(math.log(trial.memory_limit_bytes) - predicted)
    mean, deviation = normal_of(errors, unseen)
    return errors + [mean_above(least, mean, deviation) for least in ran_out if least > mean]


def normal_of(errors: list[float], unseen: float) -> tuple[float, float]:
    """Mean and deviation of a normal variable with both unknown (Gelman 2013, section 3.3), from the draws seen plus
    `WORTH` imaginary ones of mean 0 and the deviation that is expected of the `unseen`."""
    count = len(errors)
    if not count:
        return 0.0, unseen
    seen = fmean(errors)
    squares = WORTH * unseen**2 + count * pvariance(errors, seen) + WORTH * count / (WORTH + count) * seen**2
    return count * seen / (WORTH + count), math.sqrt(squares / (WORTH + count))
