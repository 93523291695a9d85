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
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autofit.lattice import Axis, Config, Value

Array = NDArray[np.float64]
Rows = NDArray[np.intp]
"""Positions of configs in their lattice."""
NO_ROWS: Rows = np.array([], dtype=np.intp)

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
"""Log of relative step time; an axis value that is not listed is expected to change nothing. It only steers."""
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
FAR = 8.0
"""Deviations above the mean beyond which the tail's own expansion is more accurate than dividing by its area."""


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
    scales: tuple[float, ...] = (1.0,)
    """Factors by which the effects' deviations may have to be multiplied, all equally likely a priori; the trials tell
    which one applies."""
    noise_scales: tuple[float, ...] = (1.0,)
    """The same for `noise`."""
    least: float = 0.0
    """Deviation of an effect below which no scale takes it."""


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


@dataclass(frozen=True, slots=True)
class _Belief:
    """Belief about the effects, and about how much figures scatter around them."""

    shift: Array
    """Shift of the effects' means from the prior's."""
    covariance: Array
    noise_variance: float


def regression(features: Array, values: Array, spreads: Array, weights: Array) -> tuple[Array, Array]:
    """Posterior mean and covariance of the effects of `features`, [observations, effects], given `values`.

    A priori each effect is normal around 0 with its deviation in `spreads`; an observation's weight is its inverse
    variance (Bishop 2006, equations 3.50 and 3.51).
    """
    precision = np.diag(spreads**-2.0) + features.T @ (weights[:, None] * features)
    covariance = np.asarray(np.linalg.inv(precision), dtype=np.float64)
    return covariance @ (features.T @ (weights * values)), covariance


def _mixed(beliefs: Sequence[_Belief], log_evidence: Array) -> _Belief:
    """Mean and covariance of a mixture, each part weighted by its evidence (laws of total expectation and variance)."""
    share = np.exp(log_evidence - log_evidence.max())
    share /= share.sum()
    shifts = np.array([b.shift for b in beliefs])
    shift = share @ shifts
    apart = shifts - shift
    within = np.tensordot(share, np.array([b.covariance for b in beliefs]), 1)
    return _Belief(
        shift=shift,
        covariance=within + (share[:, None] * apart).T @ apart,
        noise_variance=float(share @ [b.noise_variance for b in beliefs]),
    )


def _confirmed(belief: _Belief, features: Array) -> _Belief:
    """`belief` after figures of these features, [observations, effects], that are just what it expects."""
    reach = belief.covariance @ features.T
    expected = features @ reach + belief.noise_variance * np.eye(len(features))
    return replace(belief, covariance=belief.covariance - reach @ np.linalg.solve(expected, reach.T))


class LogLinear:
    """Regression of one log figure on axis values, for the configs of one lattice."""

    def __init__(
        self,
        axes: Sequence[Axis],
        configs: Iterable[Config],
        prior: Prior,
        predicted: Mapping[Config, float] | None = None,
        rough: Mapping[Config, float] | None = None,
    ) -> None:
        """`predicted`: the log figure predicted for each config; `prior` then describes the prediction error, to which
        `rough` adds the standard deviations of single configs' own."""
        every = list(configs)
        self._columns: list[tuple[str, Value | None]] = []
        means, spreads = [prior.intercept], [prior.intercept_spread]
        for axis in axes:
            found = {c.get(axis.name) for c in every} - {None}
            if len(found) < 2:
                continue
            if axis.numeric:
                self._columns.append((axis.name, None))
                means.append(prior.doubling if axis.name == "micro_batch" else 0.0)
                spreads.append(prior.spread)
            spread = prior.spread_of.get(axis.name, prior.spread)
            for value in sorted((v for v in found if v is not None), key=str):
                self._columns.append((axis.name, value))
                means.append(0.0 if axis.numeric else prior.effects.get((axis.name, value), 0.0))
                # A numeric axis has a slope as well: its values only bend that.
                spreads.append(spread / 3.0 if axis.numeric else spread)
        self._noises = [prior.noise * factor for factor in prior.noise_scales]
        self._weight = prior.weight
        self._prior_mean = np.array(means)
        self._spreads = np.array(spreads)
        effects = self._spreads[1:]
        least = np.minimum(effects, prior.least)
        self._scaled_spreads = [np.append(self._spreads[:1], np.maximum(f * effects, least)) for f in prior.scales]
        self._predicted = predicted or {}
        self._rough = rough or {}
        self._row_of = {c: number for number, c in enumerate(every)}
        self._features = np.array([self.features(c) for c in every])
        self._ahead = self._beyond(every)
        self._own = self._own_deviations(every)

    @property
    def axis_names(self) -> list[str | None]:
        """The axis that each feature belongs to; None for the first, which all configs share."""
        return [None, *(name for name, _ in self._columns)]

    @property
    def prior_variances(self) -> Array:
        """Prior variances of the features' effects."""
        return self._spreads**2

    def features(self, config: Config) -> list[float]:
        """The config as numbers: 1, then an indicator for each axis value, and the log2 of each numeric axis."""
        own = dict(config.items)
        row = [1.0]
        for name, wanted in self._columns:
            value = own.get(name)
            if wanted is None:
                row.append(math.log2(int(value)) if value is not None else 0.0)
            else:
                row.append(float(value == wanted))
        return row

    def predict(
        self, known: Sequence[tuple[Config, float]], wanted: Sequence[Config], blur: Sequence[float] | None = None
    ) -> LogNormal:
        """Predict the log figure of `wanted` from `known` (config, log figure).

        `blur`: the standard deviation of each measurement in `known`, if known. The prediction is of the figure itself,
        not of another measurement of it.
        """
        return self._predict(known, blur, self.matrix(wanted), self._beyond(wanted), self._own_deviations(wanted))

    def predict_rows(
        self,
        known: Sequence[tuple[Config, float]],
        rows: Rows,
        blur: Sequence[float] | None = None,
        under_way: Rows = NO_ROWS,
    ) -> LogNormal:
        """`predict` for configs of the lattice, given by their positions in it.

        `under_way`: configs whose figures will be known soon. They count as known to be what is expected of them (the
        kriging believer of Ginsbourger et al. 2010): predictions stay the same, and those of similar configs get surer.
        """
        return self._predict(
            known, blur, self._features[rows], self._ahead[rows], self._own[rows], self._features[under_way]
        )

    def _predict(
        self,
        known: Sequence[tuple[Config, float]],
        blur: Sequence[float] | None,
        wanted: Array,
        ahead: Array,
        own: Array,
        under_way: Array | None = None,
    ) -> LogNormal:
        seen = self.matrix([c for c, _ in known]).reshape(len(known), wanted.shape[1])
        surprise = np.array([y for _, y in known]) - self._beyond([c for c, _ in known]) - seen @ self._prior_mean
        blurred = np.square(self._own_deviations([c for c, _ in known]))
        if blur is not None:
            blurred += np.square(blur)
        parts = [
            self._belief(spreads, noise, seen, surprise, blurred)
            for spreads in self._scaled_spreads
            for noise in self._noises
        ]
        found = _mixed([belief for belief, _ in parts], np.array([evidence for _, evidence in parts]))
        if under_way is not None and len(under_way):
            found = _confirmed(found, under_way)
        variance = ((wanted @ found.covariance) * wanted).sum(axis=1) + found.noise_variance + own**2
        return LogNormal(mean=wanted @ (self._prior_mean + found.shift) + ahead, deviation=np.sqrt(variance))

    def _belief(
        self, spreads: Array, noise: float, seen: Array, surprise: Array, blurred: Array
    ) -> tuple[_Belief, float]:
        """The regression with these `spreads` of the effects and this `noise`, and its evidence: the log density of
        what was measured, up to a constant (Bishop 2006, section 3.5.1)."""
        weights = 1 / (noise**2 + blurred)
        shift, covariance = regression(seen, surprise, spreads, weights)
        misfit = max(float((weights * surprise) @ (surprise - seen @ shift)), 0.0)
        scale = 1.0
        if math.isfinite(self._weight):
            # The common scale of all deviations is learnt, too (Murphy 2012, section 7.6.3: the predictive's scale).
            scale = (self._weight + misfit) / (self._weight + len(seen))
        width = 2 * np.log(spreads).sum() - np.log(weights).sum() - np.linalg.slogdet(covariance)[1]
        return _Belief(shift, scale * covariance, scale * noise**2), -(misfit + float(width)) / 2

    def _beyond(self, configs: Sequence[Config]) -> Array:
        return np.array([self._predicted.get(c, 0.0) for c in configs])

    def _own_deviations(self, configs: Sequence[Config]) -> Array:
        return np.array([self._rough.get(c, 0.0) for c in configs])

    def matrix(self, configs: Sequence[Config]) -> Array:
        """Features of the configs, one row each; those of the lattice are computed only once."""
        numbers = [self._row_of.get(c) for c in configs]
        if None not in numbers:
            return np.asarray(self._features[np.array(numbers, dtype=np.intp)])
        return np.array([self.features(c) for c in configs])


def mean_above(least: float, mean: float, deviation: float) -> float:
    """The mean of a normal variable that is known to lie above `least` (Greene 2012, theorem 19.2)."""
    standard = (least - mean) / deviation
    if standard > FAR:
        return least + deviation / standard
    density = math.exp(-(standard**2) / 2) / math.sqrt(2 * math.pi)
    return mean + deviation * density / (math.erfc(standard / math.sqrt(2)) / 2)
