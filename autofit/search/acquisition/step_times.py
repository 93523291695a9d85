"""How long steps take: as predicted but for an error on each axis value, or slow for a cause that nobody foresaw.

A device that nobody has seen may compute one value of an axis, or a pair of values, many times slower than predicted: a
number format that it emulates, a kernel that its libraries lack. Such a cause has a heavy tail, so a surprising trial
moves what shares the cause with it by a factor of 100 and leaves the rest alone. Which cause it is stays open until
trials tell: the belief is a mixture of explanations, each a set of causes (a spike-and-slab prior, Mitchell and
Beauchamp 1988), and the search and its regret bound count all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
SLOW_MEAN, SLOW_DEVIATION = 2.0, 1.2
"""Of the logarithm of how many times slower a cause makes steps: 7, and 1.5 to 80 within 1.6 deviations. Seen: emulated
bf16 6 to 90 times slower than fp32 on processors without its arithmetic."""


def time_error(relative_error: float) -> Prior:
    """Prior for the logarithm of measured over predicted step time, given the error that predictions state.

    The device's overall speed is off by what is stated. So are the effects of axis values, but by no more than where
    nothing is predicted: even a guess from a data sheet knows that much.
    """
    stated = max(relative_error, LEAST_EFFECT)
    known_less = {axis: min(stated, spread) for axis, spread in TIME.spread_of.items()}
    return Prior(
        intercept_spread=math.log1p(stated), spread=min(stated, TIME.spread), spread_of=known_less, noise=TIME.noise
    )


@dataclass(frozen=True, slots=True)
class Mixture:
    """The logarithms of some configs' step seconds, as each explanation expects them."""

    weights: Array
    """Of the explanations; they add up to 1. Shape (explanations,)."""
    mean: Array
    """Shape (explanations, configs)."""
    deviation: Array
    """Shape (explanations, configs)."""

    def part(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> Mixture:
        """That of some of the configs."""
        return Mixture(self.weights, self.mean[:, chosen], self.deviation[:, chosen])

    def with_known(self, mean: Sequence[float], deviation: Sequence[float]) -> Mixture:
        """With further configs, of which every explanation expects the same."""
        every = (len(self.weights), len(mean))
        return Mixture(
            self.weights,
            np.hstack([self.mean, np.broadcast_to(np.array(mean), every)]),
            np.hstack([self.deviation, np.broadcast_to(np.array(deviation), every)]),
        )

    @property
    def together(self) -> LogNormal:
        """Mean and deviation over all explanations (laws of total expectation and variance)."""
        mean = self.weights @ self.mean
        variance = self.weights @ (self.deviation**2 + (self.mean - mean) ** 2)
        return LogNormal(mean=mean, deviation=np.sqrt(variance))


@dataclass(frozen=True, slots=True)
class Shown:
    """What a trial has shown of a config's step: the logarithm of its seconds, with its standard deviation."""

    config: Config
    logarithm: float
    deviation: float


@dataclass(frozen=True, slots=True)
class _Cause:
    """Something that slows some configs of the lattice."""

    members: NDArray[np.bool_]
    """Which."""
    probability: float
    """A priori."""


class _Explanation(NamedTuple):
    """A scale of the effects' deviations and of the noise, and causes."""

    scale: int
    noise: float
    causes: tuple[int, ...]
    log_weight: float
    """Log of prior times evidence, up to a constant."""


@dataclass(frozen=True, slots=True)
class _Learnt:
    """What the trials have taught under one explanation."""

    weight: float
    """Its share of the belief."""
    members: list[NDArray[np.bool_]]
    """Of each of its causes: the configs of the lattice that have it."""
    effects: Array
    """Posterior mean of the features' effects, then of the causes'."""
    covariance: Array
    """Of these."""
    noise: float

    def at(self, rows: Rows, expected: Array, matrix: Array) -> LogNormal:
        """The prediction for `rows`, of which the prior expects and which have these features: not of another
        measurement, but of the figure itself."""
        wanted, level = matrix, expected
        if self.members:
            slow = np.array([member[rows] for member in self.members], dtype=float).T
            wanted, level = np.hstack([matrix, slow]), expected + SLOW_MEAN * slow.sum(axis=1)
        variance = ((wanted @ self.covariance) * wanted).sum(axis=1)
        mean = level + wanted @ self.effects
        return LogNormal(mean=mean, deviation=np.sqrt(variance + self.noise**2))


class StepTimes:
    """The belief about the step times of one lattice's configs."""

    def __init__(self, lattice: Lattice, prior: Prior, predicted: Mapping[Config, float] | None = None) -> None:
        """`predicted`: the logarithm of each config's predicted seconds; `prior` then describes their error."""
        self._features = Features(lattice, prior, predicted)
        self._causes_of: dict[Config, list[tuple[bytes, _Cause]]] = {}
        """Of each config that was measured, each with which configs share it."""
        self._learnt = lru_cache(maxsize=2)(self._learn)
        """Between two trials, several questions are asked."""
        self._prior = prior
        first, effects = self._features.spreads[:1], self._features.spreads[1:]
        least = np.minimum(effects, LEAST_EFFECT)
        self._variances = [np.append(first, np.maximum(f * effects, least)) ** 2 for f in EFFECT_SCALES]
        self._values_of = lattice.values_of
        every = lattice.values
        found = sorted({item for values in every for item in values}, key=str)
        self._having = {item: np.array([item in values for values in every]) for item in found}
        """Which configs of the lattice have an axis value."""
        self._having_axis = {
            axis: np.array([axis in dict(values) for values in every])
            for axis in dict.fromkeys(axis for axis, _ in found)
        }

    def foretold(self, rows: Rows) -> Array:
        """The logarithms of the seconds that were expected before any trial."""
        return np.asarray(self._features.expected[rows])

    def predict(self, shown: Sequence[Shown], rows: Rows) -> Mixture:
        """Predict configs of the lattice, given by their positions in it, from what trials have shown."""
        learnt = self._learnt(tuple(shown))
        expected, matrix = self._features.expected[rows], self._features.matrix[rows]
        parts = [one.at(rows, expected, matrix) for one in learnt]
        return Mixture(
            np.array([one.weight for one in learnt]),
            np.array([p.mean for p in parts]),
            np.array([p.deviation for p in parts]),
        )

    def _learn(self, shown: tuple[Shown, ...]) -> list[_Learnt]:
        """The effects under the 64 likeliest explanations, or the fewer that have all but 0.2 % of the belief."""
        seen = _Seen.of(self._features, shown, self._causes([s.config for s in shown]))
        explanations = sorted(self._explanations(seen), key=lambda e: -e.log_weight)[:64]
        weights = np.exp(np.array([e.log_weight for e in explanations]) - explanations[0].log_weight)
        enough = int(np.searchsorted(np.cumsum(weights), 0.998 * weights.sum())) + 1
        shares = weights[:enough] / weights[:enough].sum()
        return [self._under(e, float(share), seen) for e, share in zip(explanations, shares, strict=False)]

    def _explanations(self, seen: _Seen) -> Iterable[_Explanation]:
        """Those without a cause, and the four likeliest of each number with a further one, up to three causes."""
        level = [
            _Explanation(scale, self._prior.noise * factor, (), seen.evidence(variances, self._prior.noise * factor))
            for scale, variances in enumerate(self._variances)
            for factor in NOISE_SCALES
        ]
        found = {(e.scale, e.noise, e.causes): e for e in level}
        for _ in range(3 if seen.causes else 0):
            level.sort(key=lambda e: -e.log_weight)
            level = [
                further
                for one in level[:4]
                for further in self._extended(one, seen)
                if (further.scale, further.noise, further.causes) not in found
            ]
            found.update({(e.scale, e.noise, e.causes): e for e in level})
        return found.values()

    def _extended(self, one: _Explanation, seen: _Seen) -> list[_Explanation]:
        """`one` with each further cause."""
        evidence = seen.evidence_with_another(self._variances[one.scale], one.noise, one.causes)
        chosen = math.fsum(seen.log_priors[cause] for cause in one.causes)
        return [
            _Explanation(one.scale, one.noise, tuple(sorted((*one.causes, cause))), found + chosen + log_prior)
            for cause, (found, log_prior) in enumerate(zip(evidence.tolist(), seen.log_priors, strict=True))
            if cause not in one.causes
        ]

    def _under(self, one: _Explanation, share: float, seen: _Seen) -> _Learnt:
        """The regression under one explanation, which has this `share` of the belief."""
        causes = list(one.causes)
        spreads = np.append(np.sqrt(self._variances[one.scale]), np.full(len(causes), SLOW_DEVIATION))
        had = seen.has[:, causes]
        effects, covariance = regression(
            np.hstack([seen.features, had]),
            seen.surprise - SLOW_MEAN * had.sum(axis=1),
            spreads,
            1.0 / (one.noise**2 + seen.blur),
        )
        return _Learnt(share, [seen.members[cause] for cause in causes], effects, covariance, one.noise)

    def _causes(self, measured: Iterable[Config]) -> list[_Cause]:
        """The causes that may have slowed a measured config and not all configs of the lattice: its values, all values
        of an axis but another one, and pairs of its values. Of causes that the same configs share, the first stands
        for all."""
        found: dict[bytes, _Cause] = {}
        for config in dict.fromkeys(measured):
            if config not in self._causes_of:
                self._causes_of[config] = [(cause.members.tobytes(), cause) for cause in self._of_one(config)]
            for key, cause in self._causes_of[config]:
                found.setdefault(key, cause)
        return [cause for cause in found.values() if not cause.members.all()]

    def _of_one(self, config: Config) -> Iterable[_Cause]:
        values = [item for item in self._values_of(config) if not self._having[item].all()]
        others = [item for item in self._having if item[0] in dict(values) and item not in values]
        for item in values:
            # With these chances, a device is as likely to be slow at none of a space's values as at some.
            yield _Cause(self._having[item], 1 / 30)
        for item in others:
            yield _Cause(self._having_axis[item[0]] & ~self._having[item], 1 / 30)
        for one, other in combinations(values, 2):
            yield _Cause(self._having[one] & self._having[other], 1 / 300)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the trials have shown, as arrays: Gaussian evidence of any explanation of it (Bishop 2006, section 3.5.1, in
    the dual form of section 6.4.2)."""

    features: Array
    """Of the measured configs, shape (trials, effects)."""
    surprise: Array
    """How far each is from what was expected before any trial."""
    blur: Array
    """Variance of each measurement."""
    members: list[NDArray[np.bool_]]
    """Of each cause: the configs of the lattice that have it."""
    has: Array
    """Which measured configs have which cause, as 0 or 1; shape (trials, causes)."""
    log_priors: list[float]
    """Of each cause."""

    @classmethod
    def of(cls, features: Features, shown: Sequence[Shown], causes: Sequence[_Cause]) -> _Seen:
        rows = features.rows([s.config for s in shown])
        members = [cause.members for cause in causes]
        return cls(
            features=features.matrix[rows],
            surprise=np.array([s.logarithm for s in shown]) - features.expected[rows],
            blur=np.array([s.deviation**2 for s in shown]),
            members=members,
            has=np.array([member[rows] for member in members], dtype=float).T.reshape(len(rows), len(members)),
            log_priors=[math.log(cause.probability) for cause in causes],
        )

    @property
    def causes(self) -> int:
        return len(self.members)

    def evidence(self, variances: Array, noise: float) -> float:
        """The log density of the surprises without any cause, up to a constant."""
        covariance, left = self.under(variances, noise, ())
        return -float(left @ np.linalg.solve(covariance, left) + np.linalg.slogdet(covariance)[1]) / 2

    def evidence_with_another(self, variances: Array, noise: float, causes: Sequence[int]) -> Array:
        """The same with `causes` and each further one: a rank-one change of the covariance (Sherman and Morrison)."""
        covariance, left = self.under(variances, noise, causes)
        inverse = np.linalg.inv(covariance)
        reach = inverse @ self.has
        weight = (self.has * reach).sum(axis=0)
        along = reach.T @ left
        beyond = along - SLOW_MEAN * weight
        total = SLOW_DEVIATION**-2.0 + weight
        misfit = left @ inverse @ left - 2 * SLOW_MEAN * along + SLOW_MEAN**2 * weight - beyond**2 / total
        width = np.linalg.slogdet(covariance)[1] + np.log(SLOW_DEVIATION**2 * total)
        return np.asarray(-(misfit + width) / 2)

    def under(self, variances: Array, noise: float, causes: Sequence[int]) -> tuple[Array, Array]:
        """The covariance of the surprises under an explanation, and how far they are from what it expects."""
        has = self.has[:, list(causes)]
        covariance = (self.features * variances) @ self.features.T + SLOW_DEVIATION**2 * has @ has.T
        return covariance + np.diag(noise**2 + self.blur), self.surprise - SLOW_MEAN * has.sum(axis=1)
