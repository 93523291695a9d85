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
    crashed = [set(trial.config.items) for trial in trials if _is_its_own(trial.outcome)]
    if len(crashed) < 2 or not configs:
        return np.zeros(len(configs), dtype=bool)
    values = [set(config.items) for config in configs]
    fitted = [set(trial.config.items) for trial in trials if isinstance(trial.outcome, Fits)]
    if not fitted:
        times = Counter(value for each in crashed for value in each)
        alike = [sum(times[value] for value in own) for own in values]
        return np.asarray(alike > np.quantile(alike, 0.5 ** (len(crashed) - 1)))
    everywhere = set.intersection(*values)
    causes = _causes([each.difference(everywhere, *fitted) for each in crashed])
    return np.array([any(cause <= own for cause in causes) for own in values], dtype=bool)


def _causes(crashed: list[Values]) -> list[Values]:
    """What each of several causes may be, given the suspected values of crashed configs: of those with the commonest
    value everything that they share, then of the others; what one alone has shows nothing."""
    causes = []
    times = Counter(value for each in crashed for value in each)
    while times and max(times.values()) > 1:
        commonest = max(times, key=lambda value: (times[value], str(value)))
        causes.append(set.intersection(*(each for each in crashed if commonest in each)))
        crashed = [each for each in crashed if commonest not in each]
        times = Counter(value for each in crashed for value in each)
    return causes


def _is_its_own(outcome: Outcome) -> bool:
    """Whether a config has crashed, and not what runs the trials."""
    return isinstance(outcome, Crashed) and not machinery_failed(outcome) and not worker_was_lost(outcome)
