"""A small model of memory, speed and set-up, fitted to the trials so far: what an untried config may be expected to do.

The figures are products of effects of the axes to a good approximation (checkpointing multiplies time by about 4/3,
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
PRIOR_SETUP: dict[tuple[str, Value], float] = {("compile", True): 2.5}
"""Log of relative seconds before the first timed step: compiling takes minutes where building takes seconds."""
PRIOR = {"time": PRIOR_TIME, "activations": PRIOR_ACTIVATIONS, "setup": PRIOR_SETUP}
PRIOR_INTERCEPT = {"time": (0.0, 10.0), "activations": (0.0, 10.0), "setup": (math.log(8.0), 1.0)}
"""Mean and standard deviation; only of a set-up one knows beforehand how long it takes, about."""
PRIOR_DOUBLING = {"time": -0.08, "activations": 0.6, "setup": 0.0}
"""Per doubling of the micro-batch."""
PRIOR_SPREAD = {"time": 0.20, "activations": 0.40, "setup": 0.20}
"""Standard deviation of an effect around its prior mean."""
PRIOR_SPREAD_PRECISION = 0.50
"""That of a precision's effect on time: which formats a device computes natively differs most between devices."""
PRIOR_SPREAD_COMPILE = 0.70
"""That of compilation's effect on the set-up."""
NOISE = {"time": 0.03, "activations": 0.10, "setup": 0.15}
"""Standard deviation of what the axes' effects do not explain."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Means and standard deviations of the logarithm, one entry per config."""

    mean: Array
    deviation: Array


class LogLinear:
    """Regression of one log figure on the axes' values, for the configs of one lattice."""

    def __init__(self, axes: Sequence[Axis], configs: Iterable[Config], figure: str) -> None:
        every = list(configs)
        self._columns: list[tuple[str, Value | None]] = []
        mean, spread = PRIOR_INTERCEPT[figure]
        means, spreads = [mean], [spread]
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
                means.append(0.0 if axis.numeric else PRIOR[figure].get((axis.name, value), 0.0))
                spreads.append(_spread_of(axis, figure))
        self._noise = NOISE[figure]
        self._prior_mean = np.array(means)
        self._prior_precision = np.diag(1.0 / np.square(spreads))
        self._rows = np.array([self.features(c) for c in every])
        self._row_of = {c: number for number, c in enumerate(every)}

    def features(self, config: Config) -> list[float]:
        """The config as numbers: 1, then per axis value whether it has it, and the log2 of numeric ones."""
        own = dict(config.items)
        row = [1.0]
        for name, wanted in self._columns:
            value = own.get(name)
            if wanted is None:
                row.append(math.log2(int(value)) if value is not None else 0.0)
            else:
                row.append(float(value == wanted))
        return row

    def predict(self, known: Sequence[tuple[Config, float]], wanted: Sequence[Config]) -> Prediction:
        """Predict the log figure of `wanted` from `known` (config, log figure)."""
        precision = self._prior_precision.copy()
        weighted = precision @ self._prior_mean
        if known:
            seen = self._matrix([c for c, _ in known])
            targets = np.array([y for _, y in known])
            precision += seen.T @ seen / self._noise**2
            weighted += seen.T @ targets / self._noise**2
        covariance = np.linalg.inv(precision)
        mean = covariance @ weighted
        rows = self._matrix(wanted)
        variance = ((rows @ covariance) * rows).sum(axis=1) + self._noise**2
        return Prediction(mean=rows @ mean, deviation=np.sqrt(variance))

    def _matrix(self, configs: Sequence[Config]) -> Array:
        """Features of the configs, one row each; those of the lattice are computed once for all."""
        numbers = [self._row_of.get(c) for c in configs]
        if None not in numbers:
            return np.asarray(self._rows[np.array(numbers, dtype=int)])
        return np.array([self.features(c) for c in configs])


def _spread_of(axis: Axis, figure: str) -> float:
    """Standard deviation of one value's effect; a numeric axis has its slope beside, and values only bend it."""
    if axis.name == "precision" and figure == "time":
        return PRIOR_SPREAD_PRECISION
    if axis.name == "compile" and figure == "setup":
        return PRIOR_SPREAD_COMPILE
    return PRIOR_SPREAD[figure] / (3.0 if axis.numeric else 1.0)
