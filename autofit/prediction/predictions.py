"""What a search knows before its first trial: the estimator's predictions, and how far off they have been here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from autofit.core.lattice import Config
from autofit.core.prediction import Prediction
from autofit.estimate.memory.deviation import NOTHING_COMPARED, MemoryDeviation

Report = Callable[[int, int], None]
"""Called with the number of configs that are predicted, and their total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """The predictions for a lattice and their expected error; without any, a search learns from its trials alone."""

    by_config: Mapping[Config, Prediction] = field(default_factory=dict)
    memory_deviation: MemoryDeviation = NOTHING_COMPARED
    beyond_host: Mapping[Config, int] = field(default_factory=dict)
    """The configs that need more host memory than a machine has, with the bytes that are missing."""
    host_bytes: Mapping[Config, int] = field(default_factory=dict)
    """Host memory that a trial of each config takes on one machine, all of its ranks together."""
    shared_host_bytes: int | None = None
    """Host memory of the one machine that all trials share; None where each may have its own machine, or the machine's
    memory is not known."""

    def held_beside(self, config: Config, running: Iterable[Config]) -> bool:
        """Whether the host is predicted to have memory for a trial of `config` alongside the running ones.

        That is the case if the predicted bytes of all of them together are within its memory. A config without a
        prediction counts as nothing. One that fits alongside no other is not ruled out: its trial only has to wait
        until it can run alone.
        """
        together = sum(self.host_bytes.get(each_config, 0) for each_config in (config, *running))
        return self.shared_host_bytes is None or together <= self.shared_host_bytes


class Predictor(Protocol):
    """Where a search gets its predictions from, once it needs them."""

    def predict(self, report: Report) -> Predictions:
        """The predictions, which may take their time."""


@dataclass(frozen=True, slots=True)
class ReadyMade:
    """A predictor that has them already: a replay's, or none."""

    predictions: Predictions = field(default_factory=Predictions)

    def predict(self, report: Report) -> Predictions:
        return self.predictions
