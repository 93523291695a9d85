"""Estimates of every config of a lattice: looked up if they were made before, traced otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from autofit.core.errors import in_one_line
from autofit.core.lattice import Config
from autofit.core.units import GIB
from autofit.estimate.footprint import Footprint
from autofit.prediction.calibration import not_estimated
from autofit.prediction.estimate_cache import EstimateCache
from autofit.techniques import Job
from autofit.trial.machine.cores import cores
from autofit.trial.measure.process_memory import host_available

_log = logging.getLogger(__name__)


def predict_all(
    cache: EstimateCache,
    configs: Sequence[Config],
    *,
    memory_limit_bytes: int,
    only_known: Collection[Config] = (),
    report: Callable[[int, int], None] = lambda done, total: None,
    seconds: float | None = None,
) -> dict[Config, Footprint]:
    """Every config's footprint, in the order given. What the `cache` lacks is made and kept, but for `only_known`.

    `report` is called with the number done and the total. Each config must be supported. One that cannot be traced is
    estimated by formula (`untraced`). Configs that cannot be estimated at all are left out: the estimator does not
    cover the device, or it failed, which is only logged, because no prediction is worth ending a search for. So are
    those that would be begun after `seconds`, if they are given.
    """
    job = cache.job
    footprints = cache.find(configs, memory_limit_bytes=memory_limit_bytes)
    missing = configs_to_trace(job, configs, known=footprints, only_known=only_known)
    before, possible = len(footprints), len(footprints) + len(missing)
    report(before, possible)
    if missing:
        from autofit.estimate.sweep import sweep

        try:
            new = sweep(
                job,
                missing,
                memory_limit_bytes=memory_limit_bytes,
                processes=processes(),
                report=lambda done: report(before + done, possible),
                seconds=seconds,
            )
        except Exception as error:  # whatever goes wrong, even the death of its processes, costs only predictions
            _log.warning("autofit: continuing without predictions, which failed: %s", in_one_line(error))
            new = {}
        cache.keep(new.values())
        footprints |= new
    return {config: footprints[config] for config in configs if config in footprints}


def processes() -> int:
    """How many processes to use: one for each core, but no more than there is memory for, a GiB each."""
    room = host_available()
    return cores() if room is None else min(cores(), max(1, room // GIB))


def configs_to_trace(
    job: Job, configs: Iterable[Config], *, known: Collection[Config], only_known: Collection[Config] = ()
) -> list[Config]:
    """The configs that `predict_all` has to trace, each once: neither those that are `known`, nor `only_known`."""
    if not_estimated(job.hardware) is not None:
        return []
    return [config for config in dict.fromkeys(configs) if config not in known and config not in only_known]
