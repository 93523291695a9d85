"""What trials on other hardware say about predictions here: how far they err, less than where nothing is known.

Of the errors of axis values only the size carries over, not the direction; of memory's mean error over all configs the
sign as well, with one draw for each machine (`memory_error_by`). An axis value's error stems from the hardware and the
model as much as from the estimator, but hardware of one kind shares how wide such errors are. So the errors of all axis
values are modelled as draws from one normal distribution, whose width they reveal (Gelman 2013, section 5.4). Axes in
which devices are known to differ (`Prior.spread_of`: which number formats are computed natively) are left out, and
stay as uncertain as they are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autofit.estimate.version import is_current
from autofit.lattice import Config
from autofit.outcome import Fits, Trial
from autofit.search.foresight import UNKNOWN, WORTH, learned, memory_error, normal_of
from autofit.search.surrogate import LogLinear, Prior, regression
from autofit.techniques import AXES

ROUNDS = 30
"""Iterations in which the width settles: by then it changes by less than a thousandth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """By how much one trial missed its prediction."""

    config: Config
    workload_key: str
    logarithm: float
    """Logarithm of measured over predicted."""


def effects_factor(by_hardware: Iterable[Sequence[Miss]], prior: Prior) -> float:
    """Deviation of axis values' effects where trials were compared, as a multiple of the one that `prior` states.

    1 where none were. What all trials of one workload on one hardware have in common is not an effect of an axis. The
    width is the one that makes what was seen most likely (Bishop 2006, section 3.5.2, by the steps of 9.3.4), with
    `prior` itself counting as `WORTH` effects.
    """
    shown = [_Effects(misses, prior) for misses in by_hardware if len(misses) > 1]
    variance = 1.0
    for _ in range(ROUNDS):
        squares = [effects.squares(variance) for effects in shown]
        variance = (WORTH + sum(map(sum, squares))) / (WORTH + sum(map(len, squares)))
    return math.sqrt(variance)


def memory_error_by(by_hardware: Iterable[Sequence[Trial]]) -> Prior:
    """The memory error to expect on hardware where nothing was compared, from predicted trials on other hardware: what
    the trials of one hardware have in common is a single draw, however many there are."""
    groups = [list(trials) for trials in by_hardware]
    mean, deviation = normal_of([learned(trials).intercept for trials in groups])
    known_less = memory_error(UNKNOWN)
    factor = effects_factor(map(memory_misses, groups), known_less)
    return replace(known_less, intercept=mean, intercept_spread=deviation, spread=factor * known_less.spread)


def memory_misses(trials: Iterable[Trial]) -> list[Miss]:
    """The misses of the trials that fitted and were predicted by a trace of this version."""
    found = []
    for trial in trials:
        predicted = trial.prediction
        if predicted is None or predicted.memory_error > 0 or not is_current(predicted):
            continue
        if not isinstance(trial.outcome, Fits):
            continue
        measured = trial.outcome.measurement.device_bytes
        if measured > 0 and predicted.device_bytes > 0:
            logarithm = math.log(measured / predicted.device_bytes)
            found.append(Miss(config=trial.config, workload_key=trial.workload.key, logarithm=logarithm))
    return found


class _Effects:
    """The effects of axis values on one hardware, from the same regression that a search uses."""

    def __init__(self, misses: Sequence[Miss], prior: Prior) -> None:
        configs = [miss.config for miss in misses]
        model = LogLinear(AXES, configs, prior)
        self._features = model.matrix(configs)
        self._variances = model.prior_variances
        self._shared = np.array([axis is not None and axis not in prior.spread_of for axis in model.axis_names])
        self._left = np.array(_beside_their_workload(misses))
        self._weights = np.full(len(misses), prior.noise**-2.0)

    def squares(self, variance: float) -> list[float]:
        """The expected square of each effect, relative to its prior variance, if `variance` scales that."""
        spreads = np.sqrt(np.where(self._shared, variance, 1.0) * self._variances)
        mean, covariance = regression(self._features, self._left, spreads, self._weights)
        relative = (mean**2 + np.diag(covariance)) / self._variances
        return [float(square) for square in relative[self._shared]]


def _beside_their_workload(misses: Sequence[Miss]) -> list[float]:
    of_workload: defaultdict[str, list[float]] = defaultdict(list)
    for miss in misses:
        of_workload[miss.workload_key].append(miss.logarithm)
    return [miss.logarithm - float(np.median(of_workload[miss.workload_key])) for miss in misses]
