"""What the estimator says of every config of a lattice: looked up where it was said before, traced where not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from autofit.errors import in_one_line
from autofit.estimate.estimate import Estimate
from autofit.estimate.identity import EstimateKeys
from autofit.lattice import Config
from autofit.operations.calibration import rates_for
from autofit.operations.estimate_cache import EstimateCache
from autofit.operations.estimating import not_estimated
from autofit.store import Store
from autofit.techniques import Job

_log = logging.getLogger(__name__)


def predict_all(
    job: Job,
    configs: Sequence[Config],
    *,
    memory_limit_bytes: int,
    store: Store | None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Config, Estimate]:
    """`estimate_all`, with the speed of this hardware as the store's trials have shown it."""
    found = estimate_all(job, configs, memory_limit_bytes=memory_limit_bytes, store=store, report=report)
    rates = rates_for(job.hardware, job.stack, store, job.workload.key)
    return {config: estimate.timed(job, rates) for config, estimate in found.items()}


def estimate_all(
    job: Job,
    configs: Sequence[Config],
    *,
    memory_limit_bytes: int,
    store: Store | None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Config, Estimate]:
    """Every config's estimate, in the order given, without its time, which `Estimate.timed` gives it.

    `report` is told how many of how many are done. Without a store nothing is looked up or kept. Each config must be
    supported. One that no trace can follow is estimated by formula (`memory_error` above 0, no time). Left out is what
    cannot be estimated at all: the device is not one that estimates are for, or the estimator failed, which is logged,
    because no prediction is worth ending a search for.
    """
    possible = configs if not_estimated(job.hardware) is None else []
    cache, keys = EstimateCache(store), EstimateKeys(job)
    by_key = {keys.of(config): config for config in possible}
    found = {
        by_key[key]: estimate for key, estimate in cache.known(by_key, memory_limit_bytes=memory_limit_bytes).items()
    }
    missing = {config: key for key, config in by_key.items() if config not in found}
    report(len(found), len(possible))
    if missing:
        made = _made(job, list(missing), memory_limit_bytes, lambda done: report(len(found) + done, len(possible)))
        cache.keep({missing[config]: estimate for config, estimate in made.items()})
        found |= made
    return {config: found[config] for config in possible if config in found}


def _made(job: Job, configs: list[Config], limit: int, report: Callable[[int], None]) -> dict[Config, Estimate]:
    """Whatever goes wrong inside the estimator, its processes' end included, costs the predictions alone."""
    from autofit.estimate.sweep import sweep

    try:
        return sweep(job, configs, memory_limit_bytes=limit, report=report)
    except Exception as error:
        _log.warning("autofit: goes on without predictions, which failed: %s", in_one_line(error))
        return {}
