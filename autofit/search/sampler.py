"""The search's sampler for Optuna: it suggests the open config with the highest expected gain per second of trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution

from autofit.lattice import Config
from autofit.search.advice import Advice
from autofit.search.knowledge import Knowledge

ABSENT = "-"
"""Category of an axis that does not apply to a config (`rank` of a full fine-tuning)."""


class LatticeSampler(optuna.samplers.BaseSampler):
    """Suggests whole configs of the lattice, so that no suggestion is invalid, repeated or already ruled out.

    It works in any study: `study.ask(sampler.space)` gives the next config and marks it as under way. The results of
    trials reach it through `Knowledge.learn`. If no config is open, `ask` raises `ValueError`.
    """

    def __init__(self, knowledge: Knowledge, advice: Advice) -> None:
        self._knowledge = knowledge
        self._advice = advice
        self.seconds_left: float | None = None
        """Configs whose trials are expected to take longer come last; None means no limit."""
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
        """The config to run next, as Optuna's parameters."""
        self.check_open()
        candidate = self._advice.best(self.seconds_left) or self._advice.first()
        self._knowledge.take(candidate.config)
        return parameters(candidate.config, search_space)

    def check_open(self) -> None:
        """Raises `ValueError` if there is nothing left to suggest."""
        if not self._knowledge.open:
            raise ValueError("every config of the lattice is measured, under way or ruled out")

    def sample_independent(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Never needed: all axes are sampled together."""
        raise ValueError(f"{param_name} is not an axis of the lattice")


def parameters(config: Config, space: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    """A config as Optuna's parameters."""
    return {name: ABSENT if config.get(name) is None else config[name] for name in space}


def suggested(params: Mapping[str, Any]) -> Config:
    """The inverse of `parameters`."""
    return Config.of({name: value for name, value in params.items() if value != ABSENT})
