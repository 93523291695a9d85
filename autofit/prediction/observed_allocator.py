"""What trials on the hardware show of CUDA there: whether its allocator has expandable segments, and its context."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from autofit.core.errors import StoreError
from autofit.core.outcome import Fits, Trial
from autofit.estimate.assumptions import as_probed, rounded_context
from autofit.prediction.calibration import latest_fits
from autofit.prediction.probing import stored_probe
from autofit.store import Store
from autofit.techniques import Job
from autofit.techniques.axes.optimizer import OPTIMIZERS

_log = logging.getLogger(__name__)


def with_observed_allocator(job: Job, newest_first: Iterable[Trial]) -> Job:
    """The job with the allocator and context of the latest trial that fitted on CUDA; unchanged without such a trial.
    Paged states lie outside the allocator as the context does, so with them the context stays unknown. Trials of
    users' programs do not count: these choose their allocator."""
    for trial in newest_first:
        if trial.workload.program is None and isinstance(trial.outcome, Fits) and trial.hardware.kind == "cuda":
            measurement = trial.outcome.measurement
            optimizer = OPTIMIZERS.get(str(trial.config.get("optimizer")))  # an old config may lack it
            is_paged = optimizer is not None and optimizer.paged
            outside_bytes = 0 if is_paged else measurement.device_bytes - measurement.peak_reserved_bytes
            context = rounded_context(outside_bytes) if outside_bytes > 0 else None
            return replace(job, expandable_segments=measurement.expandable_segments, context_bytes=context)
    return job


def as_trials_show(job: Job, store: Store | None) -> Job:
    """The job with what a probe, or trials of any model, workload and stack, in the store show of its hardware.

    For a catalog card that is not in this machine, the latest trial on any card of that name counts. Without a trial or
    a probe, or with a store that fails or is None, both stay unknown.
    """
    if store is None or job.hardware.kind != "cuda":
        return job
    try:
        latest = latest_fits(job.hardware, store, 20)  # among which one of autofit's own steps should be
        probe = stored_probe(job.hardware, job.stack, store, None)
    except StoreError as error:
        _log.warning("autofit: what trials have shown of CUDA cannot be looked up: %s", error)
        return job
    return as_probed(with_observed_allocator(job, latest), probe)
