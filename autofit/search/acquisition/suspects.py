"""Configs that would likely crash as others have: one technique that cannot run here is not to end a search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from autofit.core.lattice import Config
from autofit.core.outcome import Crashed, Fits, Outcome, Trial, machinery_failed, worker_was_lost


def suspicious(configs: Sequence[Config], trials: Iterable[Trial]) -> NDArray[np.bool_]:
    """Which of `configs` to come to last: those with every value that all crashed ones share and none that fitted has.

    Until something fits, those with more than half of them, of what differs at all. So each further crash halves the
    suspects, and a search comes to what works within a few trials, however many configs share the one value that does
    not. One crash shows nothing of that.
    """
    trials = list(trials)
    crashed = [set(trial.config.items) for trial in trials if _is_its_own(trial.outcome)]
    if len(crashed) < 2 or not configs:
        return np.zeros(len(configs), dtype=bool)
    fitted = [set(trial.config.items) for trial in trials if isinstance(trial.outcome, Fits)]
    everywhere = set.intersection(*(set(config.items) for config in configs))
    suspects = set.intersection(*crashed).difference(everywhere, *fitted)
    if not suspects:
        return np.zeros(len(configs), dtype=bool)
    shared = np.array([len(suspects.intersection(config.items)) for config in configs])
    return np.asarray(shared == len(suspects) if fitted else 2 * shared > len(suspects))


def _is_its_own(outcome: Outcome) -> bool:
    """Whether a config has crashed, and not what runs the trials."""
    return isinstance(outcome, Crashed) and not machinery_failed(outcome) and not worker_was_lost(outcome)
