"""Whether configs fit: the memory of each, as predicted or above its floor, corrected by what the trials took."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from autofit.core.lattice import Config, Lattice
from autofit.core.prediction import Prediction
from autofit.estimate.memory.deviation import MemoryDeviation
from autofit.prediction.memory_deviations import LEAST, WORTH
from autofit.search.acquisition.gains import normal_share_below
from autofit.search.acquisition.surrogate import ACTIVATIONS, Array, LogLinear, LogNormal, Prior, Rows
from autofit.search.lattice_state import LatticeState


class MemoryFit:
    """The belief about the memory of a lattice's configs."""

    def __init__(self, state: LatticeState, lower_bounds: Mapping[Config, int]) -> None:
        self._state = state
        configs = state.lattice.configs
        self._floors = np.array([lower_bounds[c] for c in configs], dtype=float)
        self._above_floors = LogLinear(state.lattice, ACTIVATIONS)
        """For the bytes above the floor, which with predictions is 0."""
        self.predicted = np.zeros(len(configs), dtype=bool)
        """Which configs are predicted."""
        self.sizes: dict[Config, float] = {}
        """Logarithm of every config's predicted bytes; empty without predictions."""

    def use(self, predictions: Mapping[Config, Prediction], expected: MemoryDeviation) -> None:
        """From now on, take memory as predicted up to an error learnt from trials; `expected` is the error in
        earlier ones."""
        lattice = self._state.lattice
        self.predicted = np.array([c in predictions for c in lattice.configs])
        self._floors = np.zeros(len(lattice.configs))
        sizes = {c: math.log(max(p.device_bytes, 1)) for c, p in predictions.items()}
        error, rough = memory_errors(predictions, expected)
        guessed = guesses(lattice, sizes, ACTIVATIONS)
        self.sizes = sizes | {c: mean for c, (mean, _) in guessed.items()}
        deviations = {**rough, **{c: deviation for c, (_, deviation) in guessed.items()}}
        self._above_floors = LogLinear(lattice, error, self.sizes, deviations)

    def possible(self, configs: Iterable[Config]) -> list[Config]:
        """The configs that the floor leaves."""
        limit, row_of = self._state.memory_limit_bytes, self._state.lattice.row_of
        return [config for config in configs if self._floors[row_of[config]] <= limit]

    def fit(self, rows: Rows) -> tuple[Array, Array]:
        """Expected bytes, and the probability of fitting: 1 for what a trial of something heavier has shown to fit."""
        floors, above = self._floors[rows], self._memory_above_floor(rows)
        room = np.log(np.maximum(self._state.memory_limit_bytes - floors, 1.0))
        probability = normal_share_below((room - above.mean) / above.deviation)
        configs = self._state.lattice.configs
        probability[[self._state.is_below_a_fit(configs[row]) for row in rows]] = 1.0
        return floors + np.exp(above.mean), probability

    def cannot_fit(self, rows: Rows, probability: Array) -> NDArray[np.bool_]:
        """Which of the configs, with this probability of fitting, are predicted to exceed the limit by more than
        predictions err: about three deviations of the errors seen."""
        return self.predicted[rows] & (probability < 1e-3)

    def least_that_ran_out(self) -> dict[str, float]:
        """By method, the logarithm of the least predicted bytes that have run out of memory."""
        least: dict[str, float] = {}
        for config, trial in self._state.trials.items():
            if self._state.does_not_fit(trial) and config in self.sizes:
                method = config.text("method")
                least[method] = min(self.sizes[config], least.get(method, math.inf))
        return least

    def _memory_above_floor(self, rows: Rows) -> LogNormal:
        """The logarithm of the bytes above the floor. A config that ran out needed more than its limit left above the
        floor."""
        measured = [(p.config, self._above_floor(p.config, p.measurement.device_bytes)) for p in self._state.measured()]
        ran_out = [
            (config, self._above_floor(config, trial.memory_limit_bytes))
            for config, trial in self._state.trials.items()
            if config in self._state and trial.ran_out_on_device
        ]
        return self._above_floors.predict_rows(measured, rows, ran_out)

    def _above_floor(self, config: Config, total: int) -> float:
        return math.log(max(total - self._floors[self._state.lattice.row_of[config]], 1.0))


def memory_error(deviation: float, mean: float = 0.0) -> Prior:
    """Prior for the logarithm of measured over predicted memory: most of it is common to all configs, and each axis has
    its share of the rest."""
    deviation = max(deviation, LEAST)
    return Prior(
        intercept=mean, intercept_spread=deviation, spread=deviation / 3, noise=max(deviation / 5, LEAST), weight=WORTH
    )


def memory_errors(
    predictions: Mapping[Config, Prediction], expected: MemoryDeviation
) -> tuple[Prior, dict[Config, float]]:
    """The error to expect of all predicted memory, and the deviations that formulas add for single configs.

    Where no config was traced, all share the formula's error, and a few trials show it.
    """
    formulas = {c: math.log1p(p.memory_error) for c, p in predictions.items() if p.memory_error > 0}
    if len(formulas) < len(predictions) or not formulas:
        return memory_error(expected.deviation, expected.mean), formulas
    return memory_error(max(*formulas.values(), expected.deviation), expected.mean), {}


def guesses(lattice: Lattice, logarithms: dict[Config, float], prior: Prior) -> dict[Config, tuple[float, float]]:
    """Means and standard deviations for the configs that `logarithms` lacks, from the axes' effects."""
    missing = [c for c in lattice.configs if c not in logarithms]
    if not missing:
        return {}
    model = LogLinear(lattice, prior)
    observed = list(logarithms.items())
    # As many determine the axes' effects as well as thousands would, in a regression of cubic cost.
    sample = observed if len(observed) <= 500 else random.Random(0).sample(observed, 500)
    predicted = model.predict(sample, missing)
    return dict(zip(missing, zip(predicted.mean.tolist(), predicted.deviation.tolist(), strict=True), strict=True))
