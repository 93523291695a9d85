"""A small model of memory, speed and set-up time, fitted to the trials so far, that predicts untried configs.

To a good approximation these figures are products of the axes' effects (checkpointing multiplies time by about 4/3, a
micro-batch multiplies activations), so their logarithms are linear in the axes' values. Bayesian linear regression
(Bishop 2006, section 3.3) on the logarithms gives a mean and an honest spread from a handful of trials; its prior means
are the rules of thumb that a practitioner would start from. Where the estimator has predicted a figure, the regression
models how far trials deviate from the predictions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autofit.core.lattice import Config, Lattice, Value
from autofit.core.normal import moments_above

Array = NDArray[np.float64]
Rows = NDArray[np.intp]
"""Positions of configs in their lattice."""

PRIOR_TIME: dict[tuple[str, Value], float] = {
    ("checkpointing", "full"): 0.29,
    ("checkpointing", "offload"): 0.40,
    ("checkpointing", "save-attention"): 0.27,
    ("checkpointing", "every-2"): 0.15,
    ("checkpointing", "every-4"): 0.08,
    ("checkpointing", "selective"): 0.12,
    ("precision", "bf16-mixed"): 0.15,
    ("precision", "tf32"): 0.35,
    ("precision", "fp32"): 0.60,
    ("method", "lora"): -0.10,
    ("method", "qlora"): 0.20,
    ("attention", "eager"): 0.20,
    ("kernels", "liger"): -0.08,
    ("mlp", "tiled"): 0.05,
    ("compile", True): -0.15,
}
"""Log of relative step time; an axis value that is not listed is expected to change nothing. It only steers."""
PRIOR_ACTIVATIONS: dict[tuple[str, Value], float] = {
    ("checkpointing", "full"): -1.2,
    ("checkpointing", "offload"): -1.4,
    ("checkpointing", "save-attention"): -1.1,
    ("checkpointing", "every-2"): -0.5,
    ("checkpointing", "every-4"): -0.25,
    ("checkpointing", "selective"): -0.4,
    ("precision", "bf16-mixed"): 0.2,
    ("precision", "tf32"): 0.6,
    ("precision", "fp32"): 0.6,
    ("loss", "chunked"): -0.3,
    ("loss", "fused"): -0.35,
    ("attention", "eager"): 0.5,
    ("kernels", "liger"): -0.2,
    ("mlp", "tiled"): -0.3,
}
"""Log of relative memory beyond weights, gradients and states."""
PRIOR_SETUP: dict[tuple[str, Value], float] = {("compile", True): 1.2}
"""Log of relative seconds before the first timed step: of six pairs on a processor, compiling took 2 to 4 times as long
(benchmarks/recorded/memory/compiled-cpu-zen4-2c-smollm2-135m.jsonl)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Prior belief about the logarithm of a figure, before any trial: means, and standard deviations around them."""

    intercept: float = 0.0
    intercept_spread: float = 10.0
    """The default is wide enough for a figure of which nothing is known."""
    doubling: float = 0.0
    """Mean effect of doubling the micro-batch."""
    effects: Mapping[tuple[str, Value], float] = field(default_factory=dict)
    """Mean effects of axis values; 0 for a value that is not listed."""
    spread: float
    """Standard deviation of an effect."""
    spread_of: Mapping[str, float] = field(default_factory=dict)
    """The same for axes whose effects are less well known."""
    noise: float
    """Standard deviation of what the effects do not explain."""
    weight: float = math.inf
    """How many observations the deviations are worth: the fewer, the sooner a search's own trials replace them."""


TIME = Prior(
    doubling=-0.08,
    effects=PRIOR_TIME,
    spread=0.20,
    # Devices differ most in the number formats that they compute natively.
    spread_of={"precision": 0.50},
    noise=0.03,
)
ACTIVATIONS = Prior(doubling=0.6, effects=PRIOR_ACTIVATIONS, spread=0.40, noise=0.10)
# How long a set-up takes is roughly known beforehand; least so for compilation.
SETUP = Prior(
    intercept=math.log(8.0),
    intercept_spread=1.0,
    effects=PRIOR_SETUP,
    spread=0.20,
    spread_of={"compile": 0.70},
    noise=0.15,
)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Means and standard deviations of a figure's logarithm, one entry per config."""

    mean: Array
    deviation: Array


def regression(features: Array, values: Array, spreads: Array, weights: Array) -> tuple[Array, Array]:
    """Posterior mean and covariance of the effects of `features`, [observations, effects], given `values`.

    A priori each effect is normal around 0 with its deviation in `spreads`; an observation's weight is its inverse
    variance (Bishop 2006, equations 3.50 and 3.51).
    """
    precision = np.diag(spreads**-2.0) + features.T @ (weights[:, None] * features)
    covariance = np.asarray(np.linalg.inv(precision), dtype=np.float64)
    return covariance @ (features.T @ (weights * values)), covariance


class Features:
    """The configs of one lattice as numbers, with what a prior says of each number's effect on a log figure."""

    def __init__(self, lattice: Lattice, prior: Prior, predicted: Mapping[Config, float] | None = None) -> None:
        configs = lattice.configs
        self._columns: list[tuple[str, Value | None]] = []
        means, spreads = [prior.intercept], [prior.intercept_spread]
        for axis in lattice.axes:
            values = {axis.of(c) for c in configs} - {None}
            if len(values) < 2:
                continue
            if axis.numeric:
                self._columns.append((axis.name, None))
                means.append(prior.doubling if axis.name == "micro_batch" else 0.0)
                spreads.append(prior.spread)
            spread = prior.spread_of.get(axis.name, prior.spread)
            for value in sorted((v for v in values if v is not None), key=str):
                self._columns.append((axis.name, value))
                means.append(0.0 if axis.numeric else prior.effects.get((axis.name, value), 0.0))
                # A numeric axis has a slope as well: its values only bend that.
                spreads.append(spread / 3.0 if axis.numeric else spread)
        self._row_of = lattice.row_of
        self.spreads = np.array(spreads)
        """Prior standard deviation of each effect."""
        self.matrix = np.array([self._features(dict(values)) for values in lattice.values])
        """1, then an indicator for each axis value, and the log2 of each numeric axis; shape (configs, effects)."""
        predictions = np.array([(predicted or {}).get(c, 0.0) for c in configs])
        self.expected = predictions + self.matrix @ np.array(means)
        """The log figure of each config before any trial."""

    def rows(self, configs: Iterable[Config]) -> Rows:
        return np.fromiter((self._row_of[c] for c in configs), dtype=np.intp)

    def _features(self, values: Mapping[str, Value]) -> list[float]:
        row = [1.0]
        for name, column_value in self._columns:
            value = values.get(name)
            if column_value is None:
                row.append(math.log2(int(value)) if value is not None else 0.0)
            else:
                row.append(float(value == column_value))
        return row


class LogLinear:
    """Regression of one log figure on axis values, for the configs of one lattice."""

    def __init__(
        self,
        lattice: Lattice,
        prior: Prior,
        predicted: Mapping[Config, float] | None = None,
        rough: Mapping[Config, float] | None = None,
    ) -> None:
        """`predicted`: the log figure predicted for each config; `prior` then describes the prediction error, to which
        `rough` adds further standard deviations of single configs."""
        self._features = Features(lattice, prior, predicted)
        self._noise = prior.noise
        self._weight = prior.weight
        self._rough = np.array([(rough or {}).get(c, 0.0) for c in lattice.configs])

    def predict(self, observed: Sequence[tuple[Config, float]], configs: Iterable[Config]) -> LogNormal:
        """Predict the log figure of `configs` from `observed` ones (config, log figure), all of the lattice."""
        return self.predict_rows(observed, self._features.rows(configs))

    def predict_rows(
        self, observed: Sequence[tuple[Config, float]], rows: Rows, exceeded: Sequence[tuple[Config, float]] = ()
    ) -> LogNormal:
        """`predict` for configs given by their positions; others are only known to have `exceeded` a log figure. The
        prediction is of the figure itself, not of another measurement of it."""
        seen_rows, features = self._features.rows(c for c, _ in observed), self._features
        surprise = np.array([y for _, y in observed]) - features.expected[seen_rows]
        weights = 1 / (self._noise**2 + self._rough[seen_rows] ** 2)
        shift, covariance = regression(features.matrix[seen_rows], surprise, features.spreads, weights)
        scale = 1.0
        if math.isfinite(self._weight):
            # The common scale of all deviations is learnt, too (Murphy 2012, section 7.6.3: the predictive's scale).
            misfit = max(float((weights * surprise) @ (surprise - features.matrix[seen_rows] @ shift)), 0.0)
            scale = (self._weight + misfit) / (self._weight + len(seen_rows))
        covariance, noise = scale * covariance, scale * self._noise**2 + self._rough**2
        beyond = features.rows(c for c, _ in exceeded)
        for row, least in zip(beyond, [least for _, least in exceeded], strict=True):
            # The normal distribution that has the moments of the one cut off at `least` (assumed-density filtering,
            # Minka 2001, section 3.1).
            reach = covariance @ features.matrix[row]
            mean = float(features.expected[row] + features.matrix[row] @ shift)
            variance = float(features.matrix[row] @ reach + noise[row])
            mean_beyond, variance_beyond = moments_above(least, mean, math.sqrt(variance))
            shift = shift + reach * (mean_beyond - mean) / variance
            covariance = covariance - np.outer(reach, reach) * (variance - variance_beyond) / variance**2
        matrix = features.matrix[rows]
        deviation = np.sqrt(((matrix @ covariance) * matrix).sum(axis=1) + noise[rows])
        return LogNormal(mean=features.expected[rows] + matrix @ shift, deviation=deviation)
