"""Whether CUDA's allocator has expandable segments, as trials on the hardware show."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from autofit.errors import StoreError
from autofit.operations.calibration import hardware_keys
from autofit.outcome import Fits, Trial
from autofit.store import Store
from autofit.techniques import Job

_log = logging.getLogger(__name__)


def segments_shown(newest_first: Iterable[Trial]) -> bool | None:
    """Whether the latest trial that fitted had expandable segments; None where none fitted, or none ran on CUDA."""
    had = (
        trial.outcome.measurement.expandable_segments
        for trial in newest_first
        if isinstance(trial.outcome, Fits) and trial.hardware.kind == "cuda"
    )
    return next(had, None)


def as_trials_show(job: Job, store: Store | None) -> Job:
    """The job with the allocator that the store's trials on its hardware had, of any model, workload and stack.

    Of a catalog card that is not in this machine, the latest trial on any card of that name counts. Without a trial, or
    with a store that fails or is None, it stays unknown.
    """
    if store is None or job.hardware.kind != "cuda":
        return job
    try:
        latest = [
            trial
            for key in hardware_keys(job.hardware, store)
            for trial in store.trials(hardware_key=key, outcome=Fits.kind, limit=1, newest_first=True)
        ]
    except StoreError as error:
        _log.warning("autofit: whether trials had expandable segments cannot be looked up: %s", error)
        return job
    newest_first = sorted(latest, key=lambda trial: trial.recorded_at, reverse=True)
    return replace(job, expandable_segments=segments_shown(newest_first))
