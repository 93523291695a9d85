"""One config, measured once."""

from __future__ import annotations

from datetime import UTC, datetime

from autofit.lattice import Config
from autofit.operations.requests import WorkloadOptions, memory_limit
from autofit.outcome import Outcome, Trial, Unsupported
from autofit.store import Store
from autofit.techniques import unsupported
from autofit.trial.request import DEADLINE_SECONDS, TrialRequest
from autofit.trial.runner import TrialRunner
from autofit.trial.site import detect


def trial(
    options: WorkloadOptions,
    config: Config,
    *,
    device: str = "auto",
    memory_limit_bytes: int | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    snapshot: str | None = None,
    profile: str | None = None,
    store: Store | None = None,
) -> Trial:
    """Run `config` here and now; the outcome is stored if `store` is given. Never answered from the store."""
    job = options.job(detect(device))
    limit = memory_limit(memory_limit_bytes, job.hardware)
    reason = unsupported(config, job)
    outcome: Outcome
    if reason is not None:
        outcome, seconds = Unsupported(reason=reason), 0.0
    else:
        request = TrialRequest(
            job=job,
            config=config,
            memory_limit_bytes=limit,
            deadline_seconds=deadline_seconds,
            snapshot=snapshot,
            profile=profile,
        )
        with TrialRunner(kind=job.hardware.kind) as runner:
            outcome, seconds = runner.run(request)
    done = Trial(
        config=config,
        workload=job.workload,
        hardware=job.hardware,
        stack=job.stack,
        memory_limit_bytes=limit,
        outcome=outcome,
        seconds=seconds,
        recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return store.add(done) if store is not None and reason is None else done
