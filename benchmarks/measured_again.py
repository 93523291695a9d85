"""A recorded trial, measured again: what `smaller_limits.py` and `time_order.py` share."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

from autofit.catalog.models import load
from autofit.outcome import Trial, machinery_failed
from autofit.search.budget import TIMING_SECONDS
from autofit.techniques import Job
from autofit.trial.request import TrialRequest
from autofit.workers.pool import Pool


def measured(pool: Pool, recorded: Trial, limit: int) -> Trial | None:
    """The trial of the same config under a limit of `limit` bytes; None if it failed through no fault of its own.

    It states the hardware and libraries of `pool`, which may be others than the recorded trial's."""
    workload = recorded.workload
    hardware, stack = pool.site()
    job = Job(model=load(workload.model), workload=workload, hardware=hardware, stack=stack)
    pool.submit(TrialRequest(job=job, config=recorded.config, memory_limit_bytes=limit, timing_seconds=TIMING_SECONDS))
    while not (done := pool.wait(1.0)):
        pass
    outcome = done[0].outcome
    if machinery_failed(outcome):
        print(f"failed through no fault of its own: {outcome.reason}", file=sys.stderr)
        return None
    return Trial(
        config=recorded.config,
        workload=workload,
        hardware=hardware,
        stack=stack,
        memory_limit_bytes=limit,
        outcome=outcome,
        seconds=done[0].seconds,
        recorded_at=datetime.now(UTC).isoformat(),
    )
