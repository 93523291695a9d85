"""Configs that would likely crash as others have: one technique that cannot run here is not to end a search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from autofit.core.lattice import Config, Value
from autofit.core.outcome import Crashed, Fits, Outcome, Trial, machinery_failed, worker_was_lost

Values = set[tuple[str, Value]]
"""Axes and their values."""


def suspicious(configs: Sequence[Config], trials: Iterable[Trial]) -> NDArray[np.bool_]:
    """Which of `configs` to come to last: those that have in common with crashed ones what none that fitted has.

    Until something fits, each further crash halves those to come first, which have the fewest values of crashed ones.
    So a search comes to what works within a few trials, however many configs share the values that do not. Then those
    come last that have every value of a cause (`_causes`). One crash shows nothing.
    """
    trials = list(trials)
    crashed = [set(trial.config.items) for trial in trials if _config_crashed(trial.outcome)]
    if len(crashed) < 2 or not configs:
        return np.zeros(len(configs), dtype=bool)
    config_values = [set(config.items) for config in configs]
    fitted = [set(trial.config.items) for trial in trials if isinstance(trial.outcome, Fits)]
    if not fitted:
        times = Counter(value for values in crashed for value in values)
        alike = [sum(times[value] for value in values) for values in config_values]
        return np.asarray(alike > np.quantile(alike, 0.5 ** (len(crashed) - 1)))
    everywhere = set.intersection(*config_values)
    causes = _causes([values.difference(everywhere, *fitted) for values in crashed])
    return np.array([any(cause <= values for cause in causes) for values in config_values], dtype=bool)


def _causes(crashed: list[Values]) -> list[Values]:
    """The likely causes, given the suspected values of crashed configs. The first is everything that those with the
    commonest value share, the next the same among the others. What one config alone has shows nothing."""
    causes = []
    while (times := Counter(value for values in crashed for value in values)) and max(times.values()) > 1:
        commonest = max(times, key=lambda value: (times[value], str(value)))
        causes.append(set.intersection(*(values for values in crashed if commonest in values)))
        crashed = [values for values in crashed if commonest not in values]
    return causes


def _config_crashed(outcome: Outcome) -> bool:
    return isinstance(outcome, Crashed) and not machinery_failed(outcome) and not worker_was_lost(outcome)
