"""How far off predicted memory is, as shown by the store's trials on the hardware."""

from __future__ import annotations

import logging
from itertools import chain

from autofit.core.errors import StoreError
from autofit.core.hardware import Hardware
from autofit.core.outcome import Trial
from autofit.core.workload import METHODS
from autofit.estimate.memory.deviation import MemoryDeviation
from autofit.prediction.calibration import hardware_keys
from autofit.store import Store

COMPARED = 1000
"""Number of trials, the latest ones, whose predictions are compared with their outcomes; more would add nothing."""

_log = logging.getLogger(__name__)


def memory_deviations(hardware: Hardware, store: Store | None) -> dict[str, MemoryDeviation]:
    """For each method, how far predictions were from the trials on this hardware, of any model, workload and stack.

    A method without trials, or a store that fails or is None, leaves the deviation that is assumed where nothing was
    compared (`search.foresight.UNKNOWN`).
    """
    from autofit.search.foresight import LEAST, memory_errors, normal_of

    found = {}
    trials = _predicted(hardware, store)
    for method in METHODS:
        errors = memory_errors(trial for trial in trials if trial.config.get("method") == method)
        mean, deviation = normal_of(errors)
        found[method] = MemoryDeviation(mean=mean, deviation=max(deviation, LEAST), compared_on=len(errors))
    return found


def _predicted(hardware: Hardware, store: Store | None) -> list[Trial]:
    if store is None:
        return []
    try:
        keys = hardware_keys(hardware, store)
        return list(chain.from_iterable(store.predicted(hardware_key=key, latest=COMPARED) for key in keys))
    except StoreError as error:
        _log.warning("autofit: how far off predicted memory is cannot be looked up: %s", error)
        return []
