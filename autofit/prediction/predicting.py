"""Estimates of every config of a lattice: looked up if they were made before, traced otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autofit.core.errors import in_one_line
from autofit.core.lattice import Config
from autofit.estimate.estimate import Estimate
from autofit.estimate.identity import EstimateKeys
from autofit.prediction.calibration import rates_for
from autofit.prediction.estimate_cache import EstimateCache
from autofit.prediction.estimating import not_estimated
from autofit.prediction.memory_deviations import memory_deviations
from autofit.store import Store
from autofit.techniques import Job
from autofit.trial.machine.detection import cores

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedUp:
    """What is known of a lattice's estimates before any is made."""

    cache: EstimateCache
    found: dict[Config, Estimate]
    """Those made before, without their times."""
    missing: dict[Config, str]
    """The configs that have none but can be estimated, with their keys in the cache."""


def look_up(job: Job, configs: Sequence[Config], *, memory_limit_bytes: int, store: Store | None) -> LookedUp:
    """Find the estimates made before. Without a store, or once it has failed, there are none."""
    possible = configs if not_estimated(job.hardware) is None else []
    keys = EstimateKeys(job)
    by_key = {keys.of(config): config for config in possible}
    cache = EstimateCache(store)
    known = cache.known(by_key, job, memory_limit_bytes=memory_limit_bytes)
    found = {by_key[key]: estimate for key, estimate in known.items()}
    missing = {config: key for key, config in by_key.items() if config not in found}
    return LookedUp(cache=cache, found=found, missing=missing)


def predict_all(
    job: Job,
    configs: Sequence[Config],
    *,
    memory_limit_bytes: int,
    store: Store | None,
    looked_up: LookedUp | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
    seconds: float | None = None,
) -> dict[Config, Estimate]:
    """Every config's estimate, in the order given, timed at this hardware's speed and as sure of memory as the store's
    trials show.

    `report` is called with the number done and the total. Without a store, nothing is looked up or kept; `looked_up` is
    what `look_up` found for the same arguments, if it was called already. Each config must be supported. One that
    cannot be traced is estimated by formula (`memory_error` above 0, no time). Configs that cannot be estimated at all
    are left out: the estimator does not cover the device, or it failed, which is only logged, because no prediction is
    worth ending a search for. So are those that would be begun after `seconds`, if they are given.
    """
    known = looked_up or look_up(job, configs, memory_limit_bytes=memory_limit_bytes, store=store)
    found, missing = dict(known.found), known.missing
    possible = len(found) + len(missing)
    report(len(found), possible)
    if missing:
        from autofit.estimate.sweep import sweep

        def told(done: int) -> None:
            report(len(known.found) + done, possible)

        try:
            made = sweep(
                job,
                list(missing),
                memory_limit_bytes=memory_limit_bytes,
                processes=cores(),
                report=told,
                seconds=seconds,
            )
        except Exception as error:  # whatever goes wrong, even the death of its processes, costs only predictions
            _log.warning("autofit: continuing without predictions, which failed: %s", in_one_line(error))
            made = {}
        known.cache.keep({missing[config]: estimate for config, estimate in made.items()})
        found |= made
    rates = rates_for(job.hardware, job.stack, store, job.workload.key, job.model.digest)
    shown = memory_deviations(job.hardware, store, job.workload.devices)
    return {config: found[config].timed(job, rates).judged(shown) for config in configs if config in found}
