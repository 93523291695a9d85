"""How long steps take: as predicted but for an error on each axis value, or slow for a cause that nobody foresaw.

A device that nobody has seen may compute one value of an axis, or a pair of values, many times slower than predicted: a
number format that it emulates, a kernel that its libraries lack. Such a cause has a heavy tail, so a surprising trial
moves what shares the cause with it by a factor of 100 and leaves the rest alone. Which cause it is stays open until
trials tell: the belief is a mixture of hypotheses, each a set of causes (a spike-and-slab prior, Mitchell and
Beauchamp 1988), and the search and its regret bound count all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autofit.core.lattice import Config, Lattice
from autofit.search.acquisition.surrogate import TIME, Array, Features, LogNormal, Prior, Rows, regression

EFFECT_SCALES = (1.0, 0.5, 0.25, 0.125)
"""Factors by which the effects' deviations may have to be multiplied, all equally likely a priori: an estimator that
suits a device is off by less than it states, on every axis."""
LEAST_EFFECT = 0.05
"""Deviation of an effect below which no scale takes it: a fit to few trials looks better than it is."""
NOISE_SCALES = (1.0, 2.0, 4.0)
"""The same for the errors that the axes' effects do not explain."""
MOST_CAUSES = 3
"""Of one hypothesis."""
EXTENDED = 4
"""How many hypotheses with as many causes are extended by a further one: the likeliest."""
KEPT_HYPOTHESES, KEPT_BELIEF = 64, 0.998
"""The likeliest hypotheses that count at all, or the fewer that have this share of their belief."""
SLOW_MEAN, SLOW_DEVIATION = 2.0, 1.2
"""Of the logarithm of how many times slower a cause makes steps: 7, and 1.5 to 80 within 1.6 deviations. Seen: emulated
bf16 6 to 90 times slower than fp32 on processors without its arithmetic."""


def time_error(relative_error: float) -> Prior:
    """Prior for the logarithm of measured over predicted step time, given the error that predictions state.

    The device's overall speed is off by what is stated. So are the effects of axis values, but by no more than where
    nothing is predicted: even a guess from a data sheet knows that much.
    """
    stated = max(relative_error, LEAST_EFFECT)
    spread_of = {axis: min(stated, spread) for axis, spread in TIME.spread_of.items()}
    return Prior(
        intercept_spread=math.log1p(stated), spread=min(stated, TIME.spread), spread_of=spread_of, noise=TIME.noise
    )


@dataclass(frozen=True, slots=True)
class Mixture:
    """The logarithms of some configs' step seconds, as each hypothesis expects them."""

    weights: Array
    """Of the hypotheses; they add up to 1. Shape (hypotheses,)."""
    mean: Array
    """Shape (hypotheses, configs)."""
    deviation: Array
    """Shape (hypotheses, configs)."""

    def part(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> Mixture:
        return Mixture(self.weights, self.mean[:, chosen], self.deviation[:, chosen])

    def with_measured(self, mean: Sequence[float], deviation: Sequence[float]) -> Mixture:
        """The mixture with further configs, of which every hypothesis expects the same."""
        shape = (len(self.weights), len(mean))
        return Mixture(
            self.weights,
            np.hstack([self.mean, np.broadcast_to(np.array(mean), shape)]),
            np.hstack([self.deviation, np.broadcast_to(np.array(deviation), shape)]),
        )

    @property
    def together(self) -> LogNormal:
        """Mean and deviation over all hypotheses (laws of total expectation and variance)."""
        mean = self.weights @ self.mean
        variance = self.weights @ (self.deviation**2 + (self.mean - mean) ** 2)
        return LogNormal(mean=mean, deviation=np.sqrt(variance))


@dataclass(frozen=True, slots=True)
class TimeObservation:
    """What a trial has shown of a config's step: the logarithm of its seconds, with its standard deviation."""

    config: Config
    logarithm: float
    deviation: float


@dataclass(frozen=True, slots=True)
class _Cause:
    """Something that slows some configs of the lattice."""

    members: NDArray[np.bool_]
    """Whether it slows each config of the lattice."""
    log_prior: float
    """Logarithm of its probability before any trial."""


class _Hypothesis(NamedTuple):
    """A scale of the effects' deviations and of the noise, and causes."""

    scale: int
    """Position in `EFFECT_SCALES`."""
    noise: float
    """Standard deviation of what no axis explains, in the logarithm of seconds."""
    causes: tuple[int, ...]
    """Positions among the evidence's causes, ascending."""
    log_weight: float
    """Log of prior times evidence, up to a constant."""


@dataclass(frozen=True, slots=True)
class _Posterior:
    """What the trials have taught under one hypothesis."""

    weight: float
    """Its share of the belief."""
    members: list[NDArray[np.bool_]]
    """For each of its causes: which configs of the lattice have it."""
    effects: Array
    """Posterior mean of the features' effects, then of the causes'."""
    covariance: Array
    """Of these."""
    noise: float

    def at(self, rows: Rows, expected: Array, matrix: Array) -> LogNormal:
        """The prediction for `rows`, with these prior means and features: not of another measurement, but of the figure
        itself."""
        features, level = matrix, expected
        if self.members:
            slow = np.array([member[rows] for member in self.members], dtype=float).T
            features, level = np.hstack([matrix, slow]), expected + SLOW_MEAN * slow.sum(axis=1)
        variance = ((features @ self.covariance) * features).sum(axis=1)
        mean = level + features @ self.effects
        return LogNormal(mean=mean, deviation=np.sqrt(variance + self.noise**2))


class StepTimes:
    """The belief about the step times of one lattice's configs."""

    def __init__(self, lattice: Lattice, prior: Prior, predicted: Mapping[Config, float] | None = None) -> None:
        """`predicted`: the logarithm of each config's predicted seconds; `prior` then describes their error."""
        self._features = Features(lattice, prior, predicted)
        self._keyed_causes = cache(lambda c: [(cause.members.tobytes(), cause) for cause in self._causes_of(c)])
        """For a measured config: its causes, each with its members as a key."""
        self._posteriors = lru_cache(maxsize=2)(self._learn)
        """Cached: between two trials, several questions are asked."""
        self._prior = prior
        first, effects = self._features.spreads[:1], self._features.spreads[1:]
        least = np.minimum(effects, LEAST_EFFECT)
        self._variances = [np.append(first, np.maximum(f * effects, least)) ** 2 for f in EFFECT_SCALES]
        self._values_of = lattice.values_of
        items = sorted({item for values in lattice.values for item in values}, key=str)
        self._having = {item: np.array([item in values for values in lattice.values]) for item in items}
        """Which configs of the lattice have an axis value."""
        self._having_axis = {
            axis: np.array([axis in dict(values) for values in lattice.values])
            for axis in dict.fromkeys(axis for axis, _ in items)
        }

    def predict(self, observations: Sequence[TimeObservation], rows: Rows) -> Mixture:
        """Predict configs of the lattice, given by their positions in it, from what trials have shown."""
        posteriors = self._posteriors(tuple(observations))
        expected, matrix = self._features.expected[rows], self._features.matrix[rows]
        parts = [posterior.at(rows, expected, matrix) for posterior in posteriors]
        return Mixture(
            np.array([posterior.weight for posterior in posteriors]),
            np.array([p.mean for p in parts]),
            np.array([p.deviation for p in parts]),
        )

    def _learn(self, observations: tuple[TimeObservation, ...]) -> list[_Posterior]:
        """The effects under the likeliest hypotheses (`KEPT_HYPOTHESES`), with each one's share of the belief."""
        evidence = _Evidence.of(self._features, observations, self._causes([o.config for o in observations]))
        hypotheses = sorted(self._hypotheses(evidence), key=lambda h: -h.log_weight)[:KEPT_HYPOTHESES]
        weights = np.exp(np.array([h.log_weight for h in hypotheses]) - hypotheses[0].log_weight)
        enough = int(np.searchsorted(np.cumsum(weights), KEPT_BELIEF * weights.sum())) + 1
        shares = weights[:enough] / weights[:enough].sum()
        return [self._posterior(h, float(share), evidence) for h, share in zip(hypotheses, shares, strict=False)]

    def _hypotheses(self, evidence: _Evidence) -> Iterable[_Hypothesis]:
        """Those without a cause, one for each scale of the effects and of the noise; then, cause by cause, the
        likeliest (`EXTENDED`) of the last ones with each further cause."""
        last = [
            _Hypothesis(scale, noise, (), evidence.log_density(variances, noise))
            for scale, variances in enumerate(self._variances)
            for noise in (self._prior.noise * factor for factor in NOISE_SCALES)
        ]
        hypotheses = {h[:-1]: h for h in last}  # the same causes may be come to in another order
        for _ in range(MOST_CAUSES if evidence.causes else 0):
            last.sort(key=lambda h: -h.log_weight)
            last = [further for hypothesis in last[:EXTENDED] for further in self._extended(hypothesis, evidence)]
            hypotheses.update({h[:-1]: h for h in last})
        return hypotheses.values()

    def _extended(self, hypothesis: _Hypothesis, evidence: _Evidence) -> list[_Hypothesis]:
        scale, noise, causes, _ = hypothesis
        densities = evidence.log_densities_with_another(self._variances[scale], noise, causes)
        prior = math.fsum(evidence.causes[number].log_prior for number in causes)
        return [
            _Hypothesis(scale, noise, tuple(sorted((*causes, number))), density + prior + cause.log_prior)
            for number, (density, cause) in enumerate(zip(densities.tolist(), evidence.causes, strict=True))
            if number not in causes
        ]

    def _posterior(self, hypothesis: _Hypothesis, share: float, evidence: _Evidence) -> _Posterior:
        """The regression under one hypothesis, which has this `share` of the belief."""
        causes = list(hypothesis.causes)
        spreads = np.append(np.sqrt(self._variances[hypothesis.scale]), np.full(len(causes), SLOW_DEVIATION))
        has = evidence.has[:, causes]
        effects, covariance = regression(
            np.hstack([evidence.features, has]),
            evidence.surprise - SLOW_MEAN * has.sum(axis=1),
            spreads,
            1.0 / (hypothesis.noise**2 + evidence.blur),
        )
        members = [evidence.causes[number].members for number in causes]
        return _Posterior(share, members, effects, covariance, hypothesis.noise)

    def _causes(self, measured: Iterable[Config]) -> list[_Cause]:
        """The causes that may have slowed a measured config and not all configs of the lattice: its values, all values
        of an axis but another one, and pairs of its values. Of causes that the same configs share, the first stands
        for all."""
        causes: dict[bytes, _Cause] = {}
        for config in dict.fromkeys(measured):
            for key, cause in self._keyed_causes(config):
                causes.setdefault(key, cause)
        return [cause for cause in causes.values() if not cause.members.all()]

    def _causes_of(self, config: Config) -> Iterable[_Cause]:
        values = [item for item in self._values_of(config) if not self._having[item].all()]
        others = [item for item in self._having if item[0] in dict(values) and item not in values]
        # With these chances, a device is as likely to be slow at none of a space's values as at some.
        of_value, of_pair = math.log(1 / 30), math.log(1 / 300)
        for item in values:
            yield _Cause(self._having[item], of_value)
        for item in others:
            yield _Cause(self._having_axis[item[0]] & ~self._having[item], of_value)
        for first, second in combinations(values, 2):
            yield _Cause(self._having[first] & self._having[second], of_pair)


@dataclass(frozen=True, slots=True)
class _Evidence:
    """The observations as arrays, and how likely a hypothesis makes them: Gaussian evidence (Bishop 2006, section
    3.5.1, in the dual form of section 6.4.2)."""

    features: Array
    """Of the measured configs, shape (trials, effects)."""
    surprise: Array
    """How far each is from what was expected before any trial."""
    blur: Array
    """Variance of each measurement."""
    causes: Sequence[_Cause]
    has: Array
    """Which measured configs have which cause, as 0 or 1; shape (trials, causes)."""

    @classmethod
    def of(cls, features: Features, observations: Sequence[TimeObservation], causes: Sequence[_Cause]) -> _Evidence:
        rows = features.rows([o.config for o in observations])
        has = [cause.members[rows] for cause in causes]
        return cls(
            features=features.matrix[rows],
            surprise=np.array([o.logarithm for o in observations]) - features.expected[rows],
            blur=np.array([o.deviation**2 for o in observations]),
            causes=causes,
            has=np.array(has, dtype=float).T.reshape(len(rows), len(causes)),
        )

    def log_density(self, variances: Array, noise: float) -> float:
        """The log density of the surprises without any cause, up to a constant."""
        covariance, residual = self._expected(variances, noise, ())
        return -float(residual @ np.linalg.solve(covariance, residual) + np.linalg.slogdet(covariance)[1]) / 2

    def log_densities_with_another(self, variances: Array, noise: float, causes: Sequence[int]) -> Array:
        """The log density with `causes` and each further one: a rank-one change of the covariance (Sherman and
        Morrison)."""
        covariance, residual = self._expected(variances, noise, causes)
        inverse = np.linalg.inv(covariance)
        reach = inverse @ self.has
        weight = (self.has * reach).sum(axis=0)
        along = reach.T @ residual
        beyond = along - SLOW_MEAN * weight
        total = SLOW_DEVIATION**-2.0 + weight
        misfit = residual @ inverse @ residual - 2 * SLOW_MEAN * along + SLOW_MEAN**2 * weight - beyond**2 / total
        width = np.linalg.slogdet(covariance)[1] + np.log(SLOW_DEVIATION**2 * total)
        return np.asarray(-(misfit + width) / 2)

    def _expected(self, variances: Array, noise: float, causes: Sequence[int]) -> tuple[Array, Array]:
        """The covariance of the surprises under a hypothesis, and how far they are from what it expects."""
        has = self.has[:, list(causes)]
        covariance = (self.features * variances) @ self.features.T + SLOW_DEVIATION**2 * has @ has.T
        return covariance + np.diag(noise**2 + self.blur), self.surprise - SLOW_MEAN * has.sum(axis=1)
