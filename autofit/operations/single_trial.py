"""One config, measured once."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from autofit.core.errors import UsageError
from autofit.core.lattice import Config
from autofit.core.outcome import DEADLINE_SECONDS, TimedOut, Trial, Unsupported
from autofit.planning.requests import WorkloadOptions, left_by_others, memory_limit
from autofit.store.trial_log import StoredTrials
from autofit.training.prerequisites.requirements import why_not_trainable
from autofit.trial.attempt import Attempt
from autofit.trial.machine.detection import check_devices, detect
from autofit.trial.measure.recording import check_writable, modified
from autofit.trial.process.group_runner import GroupRunner
from autofit.trial.program.command import Command
from autofit.trial.request import TrialRequest

_log = logging.getLogger(__name__)


class TrialInterrupted(KeyboardInterrupt):
    """Ctrl-C has ended a trial."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.trial = trial
        """With a `TimedOut` that has what was measured so far; it is not stored."""


def trial(
    options: WorkloadOptions,
    config: Config,
    *,
    device: str = "auto",
    memory_limit_bytes: int | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    snapshot: str | None = None,
    profile: str | None = None,
    log: StoredTrials | None = None,
) -> Trial:
    """Run `config` here and now, without looking in the store; with a `log` the outcome is stored.

    A failing store does not cost the outcome: it is returned, and `log.check()` says where else it was kept.

    `snapshot` and `profile` are files for recordings of one more step, made after the measurement. Raises
    `TrialInterrupted` if Ctrl-C ends a trial that runs.
    """
    job = options.job(detect(device))
    check_devices(job.hardware, options.devices)
    if job.workload.program is not None:
        Command.parse(job.workload.program).check_found()
        if snapshot is not None or profile is not None:
            raise UsageError("--snapshot and --profile record autofit's own step: leave them out with --command")
    if snapshot is not None and job.hardware.kind != "cuda":
        raise UsageError("--snapshot needs a CUDA device: the CPU has no caching allocator to take a snapshot of")
    recordings = {name: path for name, path in (("--snapshot", snapshot), ("--profile", profile)) if path is not None}
    for name, path in recordings.items():
        check_writable(path, name)
    before = {path: modified(path) for path in recordings.values()}
    limit = memory_limit(memory_limit_bytes, job.hardware, options.devices)
    if memory_limit_bytes is None:
        limit = left_by_others(limit, job.hardware, options.devices)
    request = TrialRequest(
        job=job,
        config=config,
        memory_limit_bytes=limit,
        deadline_seconds=deadline_seconds,
        compares_gradient=True,
        snapshot=snapshot,
        profile=profile,
    )
    reason = why_not_trainable(config, job)
    if reason is not None:
        attempt, was_interrupted = Attempt(outcome=Unsupported(reason=reason), seconds=0.0), False
    else:
        with GroupRunner(kind=job.hardware.kind, ranks=options.devices) as runner:
            attempt, was_interrupted = _attempt(runner, request)
    done = request.trial(attempt)
    if was_interrupted:
        raise TrialInterrupted(done)
    stored = log.keep(done) if log is not None and not isinstance(done.outcome, Unsupported) else done
    for name, path in recordings.items():
        if modified(path) == before[path]:
            _log.warning("%s: nothing was recorded in %s (the trial itself: %s)", name, path, done.outcome.kind)
    return stored


def _attempt(runner: GroupRunner, request: TrialRequest) -> tuple[Attempt, bool]:
    """The attempt, and whether the user has interrupted it. Made in a thread, so that this one can have it end."""
    with ThreadPoolExecutor(1, thread_name_prefix="autofit-trial") as threads:
        try:
            running = threads.submit(runner.attempt, request)
            try:
                return running.result(), False
            except KeyboardInterrupt:
                runner.interrupt()
                ended = running.result(timeout=5.0)  # what it has shown so far
                return ended, isinstance(ended.outcome, TimedOut)  # else it has ended by itself meanwhile
        except TimeoutError:  # it waits for its device, or has not begun: there is nothing to tell
            runner.close()
            raise KeyboardInterrupt from None
        except BaseException:
            runner.close()
            raise
