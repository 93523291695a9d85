"""One config, measured once."""

from __future__ import annotations

import logging

from autofit.core.attempt import Attempt
from autofit.errors import UsageError
from autofit.lattice import Config
from autofit.operations.keeping import Keeper
from autofit.operations.requests import WorkloadOptions, left_by_others, memory_limit
from autofit.outcome import DEADLINE_SECONDS, Trial, Unsupported, now
from autofit.training.requirements import cannot_here
from autofit.trial.group_runner import GroupRunner
from autofit.trial.recording import check_writable, modified
from autofit.trial.request import TrialRequest
from autofit.trial.site import check_devices, detect

_log = logging.getLogger(__name__)


def trial(
    options: WorkloadOptions,
    config: Config,
    *,
    device: str = "auto",
    memory_limit_bytes: int | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    snapshot: str | None = None,
    profile: str | None = None,
    keeper: Keeper | None = None,
) -> Trial:
    """Run `config` here and now, without looking in the store; with a `keeper` the outcome is stored.

    A failing store does not cost the outcome: it is returned, and `keeper.check()` says where else it was kept.

    `snapshot` and `profile` are files for recordings of one more step, made after the measurement.
    """
    job = options.job(detect(device))
    check_devices(job.hardware, options.devices)
    if snapshot is not None and job.hardware.kind != "cuda":
        raise UsageError("--snapshot needs a CUDA device: the CPU has no caching allocator to take a snapshot of")
    recordings = {name: path for name, path in (("--snapshot", snapshot), ("--profile", profile)) if path is not None}
    for name, path in recordings.items():
        check_writable(path, name)
    before = {path: modified(path) for path in recordings.values()}
    limit = memory_limit(memory_limit_bytes, job.hardware, options.devices)
    if memory_limit_bytes is None:
        limit = left_by_others(limit, job.hardware, options.devices)
    reason = cannot_here(config, job)
    if reason is not None:
        attempt = Attempt(outcome=Unsupported(reason=reason), seconds=0.0)
    else:
        request = TrialRequest(
            job=job,
            config=config,
            memory_limit_bytes=limit,
            deadline_seconds=deadline_seconds,
            compares_gradient=True,
            snapshot=snapshot,
            profile=profile,
        )
        with GroupRunner(kind=job.hardware.kind, ranks=options.devices) as runner:
            attempt = runner.attempt(request)
    outcome = attempt.outcome
    done = Trial(
        config=config,
        workload=job.workload,
        hardware=job.hardware,
        stack=job.stack,
        memory_limit_bytes=limit,
        outcome=outcome,
        seconds=attempt.seconds,
        recorded_at=now(),
        device_state=attempt.device_state,
    )
    stored = keeper.keep(done) if keeper is not None and not isinstance(outcome, Unsupported) else done
    for name, path in recordings.items():
        if modified(path) == before[path]:
            _log.warning("%s: nothing was recorded in %s (the trial itself: %s)", name, path, outcome.kind)
    return stored
