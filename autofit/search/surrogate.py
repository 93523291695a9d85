"""A small model of memory and speed, fitted to the trials so far: what an untried config may be expected to do.

Both figures are products of effects of the axes to a good approximation (checkpointing multiplies time by about 4/3,
a micro-batch multiplies activations), so their logarithms are linear in the axes' values. A Bayesian linear
regression (Bishop 2006, section 3.3) on those gives a mean and an honest spread from a handful of trials; its prior
means are the folklore that a practitioner would start from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autofit.lattice import Axis, Config, Value

Array = NDArray[np.float64]

PRIOR_TIME: dict[tuple[str, Value], float] = {
    ("checkpointing", "full"): 0.29,
    ("checkpointing", "offload"): 0.40,
    ("checkpointing", "every-2"): 0.15,
    ("checkpointing", "every-4"): 0.08,
    ("checkpointing", "selective"): 0.12,
    ("precision", "bf16-mixed"): 0.15,
    ("precision", "fp32"): 0.60,
    ("method", "lora"): -0.10,
    ("method", "qlora"): 0.20,
    ("attention", "eager"): 0.20,
    ("compile", True): -0.10,
}
"""Log of relative step time; an axis value that is not named is expected to change nothing. It only steers."""
PRIOR_ACTIVATIONS: dict[tuple[str, Value], float] = {
    ("checkpointing", "full"): -1.2,
    ("checkpointing", "offload"): -1.4,
    ("checkpointing", "every-2"): -0.5,
    ("checkpointing", "every-4"): -0.25,
    ("checkpointing", "selective"): -0.4,
    ("precision", "bf16-mixed"): 0.2,
    ("precision", "fp32"): 0.6,
    ("loss", "chunked"): -0.3,
    ("loss", "fused"): -0.35,
    ("attention", "eager"): 0.5,
}
"""Log of relative memory beyond weights, gradients and states."""
PRIOR_DOUBLING = {"time": -0.08, "activations": 0.6}
"""Per doubling of the micro-batch."""
PRIOR_SPREAD = {"time": 0.20, "activations": 0.40}
"""Standard deviation of an effect around its prior mean."""
PRIOR_SPREAD_PRECISION = 0.50
"""That of a precision's effect on time: which formats a device computes natively differs most between devices."""
NOISE = {"time": 0.03, "activations": 0.10}
"""Standard deviation of what the axes' effects do not explain."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Means and standard deviations of the logarithm, one entry per config."""

    mean: Array
    deviation: Array


class LogLinear:
    """Regression of one log figure on the axes' values."""

    def __init__(self, axes: Sequence[Axis], configs: Iterable[Config], figure: str) -> None:
        prior = PRIOR_TIME if figure == "time" else PRIOR_ACTIVATIONS
        every = list(configs)
        self._columns: list[tuple[str, Value | None]] = []
        means, spreads = [0.0], [10.0]  # the intercept is free
        for axis in axes:
            found = {c.get(axis.name) for c in every} - {None}
            if len(found) < 2:
                continue
            if axis.numeric:
                self._columns.append((axis.name, None))
                means.append(PRIOR_DOUBLING[figure] if axis.name == "micro_batch" else 0.0)
                spreads.append(PRIOR_SPREAD[figure])
            for value in sorted((v for v in found if v is not None), key=str):
                self._columns.append((axis.name, value))
                means.append(0.0 if axis.numeric else prior.get((axis.name, value), 0.0))
                spreads.append(_spread_of(axis, figure))
        self._noise = NOISE[figure]
        self._prior_mean = np.array(means)
        self._prior_precision = np.diag(1.0 / np.square(spreads))

    def features(self, config: Config) -> list[float]:
        """The config as numbers: 1, then per axis value whether it has it, and the log2 of numeric ones."""
        row = [1.0]
        for name, value in self._columns:
            own = config.get(name)
            if value is None:
                row.append(math.log2(int(own)) if own is not None else 0.0)
            else:
                row.append(float(own == value))
        return row

    def predict(self, known: Sequence[tuple[Config, float]], wanted: Sequence[Config]) -> Prediction:
        """Predict the log figure of `wanted` from `known` (config, log figure)."""
        precision = self._prior_precision.copy()
        weighted = precision @ self._prior_mean
        if known:
            seen = np.array([self.features(c) for c, _ in known])
            targets = np.array([y for _, y in known])
            precision += seen.T @ seen / self._noise**2
            weighted += seen.T @ targets / self._noise**2
        covariance = np.linalg.inv(precision)
        mean = covariance @ weighted
        rows = np.array([self.features(c) for c in wanted])
        variance = np.einsum("ij,jk,ik->i", rows, covariance, rows) + self._noise**2
        return Prediction(mean=rows @ mean, deviation=np.sqrt(variance))


def _spread_of(axis: Axis, figure: str) -> float:
    """Standard deviation of one value's effect; a numeric axis has its slope beside, and values only bend it."""
    if axis.name == "precision" and figure == "time":
        return PRIOR_SPREAD_PRECISION
    return PRIOR_SPREAD[figure] / (3.0 if axis.numeric else 1.0)
