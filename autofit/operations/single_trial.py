"""One config, measured once."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from autofit.core.errors import UsageError
from autofit.core.lattice import Config
from autofit.core.outcome import DEADLINE_SECONDS, TimedOut, Trial, Unsupported
from autofit.planning.requests import WorkloadOptions, memory_limit_here
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

    If the store fails, `log.check()` says where else the outcome was kept. `snapshot` and `profile` are files for
    recordings of one more step, made after the measurement. Raises `TrialInterrupted` if Ctrl-C ends a running trial.
    """
    job = options.job(detect(device))
    check_devices(job.hardware, options.devices)
    if job.workload.program is not None:
        Command.parse(job.workload.program).check_found()
    request = TrialRequest(
        job=job,
        config=config,
        memory_limit_bytes=memory_limit_here(memory_limit_bytes, job.hardware, options.devices),
        deadline_seconds=deadline_seconds,
        compares_gradient=True,
        snapshot=snapshot,
        profile=profile,
    )
    recordings = _recordings(request)
    before = {path: modified(path) for path in recordings.values()}
    attempt, was_interrupted = _attempt(request)
    done = request.trial(attempt)
    if was_interrupted:
        raise TrialInterrupted(done)
    stored = log.keep(done) if log is not None and not isinstance(done.outcome, Unsupported) else done
    for option, path in recordings.items():
        if modified(path) == before[path]:
            _log.warning("%s: nothing was recorded in %s (the trial itself: %s)", option, path, done.outcome.kind)
    return stored


def _recordings(request: TrialRequest) -> dict[str, str]:
    """The files to record in, by option. Raises `UsageError` for what cannot be recorded, or written."""
    options = {"--snapshot": request.snapshot, "--profile": request.profile}
    files = {option: path for option, path in options.items() if path is not None}
    if files and request.job.workload.program is not None:
        raise UsageError("--snapshot and --profile record autofit's own step: leave them out with --command")
    if request.snapshot is not None and request.job.hardware.kind != "cuda":
        raise UsageError("--snapshot needs a CUDA device: the CPU has no caching allocator to take a snapshot of")
    for option, path in files.items():
        check_writable(path, option)
    return files


def _attempt(request: TrialRequest) -> tuple[Attempt, bool]:
    """The attempt, and whether the user has interrupted it. Made in a thread, so that this one can have it end."""
    job = request.job
    if (reason := why_not_trainable(request.config, job)) is not None:
        return Attempt(outcome=Unsupported(reason=reason), seconds=0.0), False
    with (
        GroupRunner(kind=job.hardware.kind, ranks=job.workload.devices) as runner,
        ThreadPoolExecutor(1, thread_name_prefix="autofit-trial") as threads,
    ):
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
