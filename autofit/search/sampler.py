"""The search's sampler for Optuna: it asks for the open config with the highest expected gain."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution

from autofit.frontier import Point, pareto
from autofit.lattice import Config
from autofit.outcome import Fits
from autofit.search.knowledge import Knowledge
from autofit.search.surrogate import LogLinear, Prediction

Array = NDArray[np.float64]

ABSENT = "-"
"""Category of an axis that does not apply to a config (`rank` of a full fine-tuning)."""
NORMAL_DRAWS = np.array([-1.75, -1.15, -0.76, -0.45, -0.15, 0.15, 0.45, 0.76, 1.15, 1.75])
"""Midpoints of ten equally likely parts of the normal distribution: expectations are averages over these."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An open config with what running it may bring."""

    config: Config
    expected_gain: float
    """Expected gain of the best speed of its method, plus that of the frontier's area; relative, 0.01 is 1 %."""
    fit_probability: float


class Advice:
    """Expected gains of the open configs, from the lattice, the trials so far and the memory floor."""

    def __init__(self, knowledge: Knowledge, floor: Callable[[Config], int]) -> None:
        self._knowledge = knowledge
        configs = knowledge.lattice.configs
        self._floors = {c: floor(c) for c in configs}
        self._time = LogLinear(knowledge.lattice.axes, configs, "time")
        self._activations = LogLinear(knowledge.lattice.axes, configs, "activations")

    def candidates(self) -> list[Candidate]:
        """Every open config with its expected gain, the most promising first."""
        open_configs = self._knowledge.open
        if not open_configs:
            return []
        measured = [
            (config, trial.outcome.measurement)
            for config, trial in self._knowledge.trials.items()
            if isinstance(trial.outcome, Fits)
        ]
        time = self._time.predict([(c, math.log(m.step_seconds.median)) for c, m in measured], open_configs)
        excess = [(c, math.log(max(m.device_bytes - self._floors.get(c, 0), 1))) for c, m in measured]
        activations = self._activations.predict(excess, open_configs)
        found = []
        points = self._knowledge.points()
        for method in dict.fromkeys(c.text("method") for c in open_configs):
            chosen = [i for i, c in enumerate(open_configs) if c["method"] == method]
            own = [p for p in points if p.method == method]
            found += self._gains(
                [open_configs[i] for i in chosen], _part(time, chosen), _part(activations, chosen), own
            )
        return sorted(found, key=lambda c: -c.expected_gain)

    def _gains(
        self, configs: Sequence[Config], time: Prediction, activations: Prediction, points: Sequence[Point]
    ) -> list[Candidate]:
        limit = float(self._knowledge.memory_limit_bytes)
        floors = np.array([self._floors[c] for c in configs], dtype=float)
        draws = NORMAL_DRAWS[None, :]
        memory = floors[:, None] + np.exp(activations.mean[:, None] + activations.deviation[:, None] * draws)
        fits = memory <= limit
        probability = fits.mean(axis=1)
        if not points:
            # Nothing of this method has fitted yet: the fastest that is likely to fit comes first.
            speed = np.exp(-time.mean)
            return [
                Candidate(c, float(1.0 + p * s / speed.max()), float(p))
                for c, p, s in zip(configs, probability, speed, strict=True)
            ]
        best = min(p.measurement.step_seconds.median for p in points)
        speedup = best / np.exp(time.mean[:, None] + time.deviation[:, None] * draws)  # 1 is the best so far
        faster = np.maximum(0.0, speedup - 1.0).mean(axis=1) * probability
        area = np.array(
            [
                _area_gain(points, best, float(np.median(m)), s, limit)
                for m, s in zip(memory, np.exp(math.log(best) - time.mean), strict=True)
            ]
        )
        return [
            Candidate(c, float(f + 0.5 * a * p), float(p))
            for c, f, a, p in zip(configs, faster, area, probability, strict=True)
        ]


def _part(prediction: Prediction, chosen: list[int]) -> Prediction:
    return Prediction(mean=prediction.mean[chosen], deviation=prediction.deviation[chosen])


def _area_gain(points: Sequence[Point], best: float, memory: float, speedup: float, limit: float) -> float:
    """Growth of the area under the frontier by one more point; memory as a share of the limit, speed of the best."""
    if memory > limit:
        return 0.0
    stairs = [(p.measurement.device_bytes / limit, best / p.measurement.step_seconds.median) for p in pareto(points)]
    gain, left, height = 0.0, memory / limit, 0.0
    for share, speed in stairs:
        if share <= left:
            height = max(height, speed)
            continue
        gain += max(0.0, speedup - height) * (share - left)
        left, height = share, max(height, speed)
    return gain + max(0.0, speedup - height) * max(0.0, 1.0 - left)


class LatticeSampler(optuna.samplers.BaseSampler):
    """Suggests whole configs of the lattice, so that no suggestion is invalid, repeated or already ruled out."""

    def __init__(self, knowledge: Knowledge) -> None:
        self.next: Config | None = None
        """The config that the next `ask` gives."""
        self.space: dict[str, BaseDistribution] = {}
        for axis in knowledge.lattice.axes:
            values = dict.fromkeys(
                ABSENT if c.get(axis.name) is None else c[axis.name] for c in knowledge.lattice.configs
            )
            self.space[axis.name] = CategoricalDistribution(tuple(values))

    def infer_relative_search_space(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """All axes at once."""
        return self.space

    def sample_relative(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The chosen config, as Optuna's parameters."""
        assert self.next is not None, "ask through Adviser, which chooses first"
        return parameters(self.next, search_space)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Never needed: every axis is sampled together."""
        raise AssertionError(f"{param_name} is not an axis of the lattice")


def parameters(config: Config, space: dict[str, BaseDistribution]) -> dict[str, Any]:
    """A config as Optuna's parameters."""
    return {name: ABSENT if config.get(name) is None else config[name] for name in space}
