"""Trials on this machine without Ray: for tests, debugging, and `autofit trial`."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.lattice import Config
from autofit.techniques import Job
from autofit.training.prerequisites.requirements import why_not_trainable
from autofit.trial.attempt import Attempt
from autofit.trial.machine.detection import check_devices, detect
from autofit.trial.process.group_runner import GroupRunner
from autofit.trial.request import TrialRequest
from autofit.workers.pool import Completed, Pool


class InPlacePool(Pool):
    """One trial at a time, each on the same devices of this machine."""

    size = 1

    def __init__(self, *, device: str = "auto", devices: int = 1) -> None:
        """A pool for trials of `devices` ranks. Raises `EnvironmentLacks` if this machine does not have that many."""
        self._site = detect(device)
        check_devices(self._site[0], devices)
        self._runner = GroupRunner(kind=self._site[0].kind, ranks=devices)
        self._runner.start()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="autofit-trial")
        self._running: dict[Future[Attempt], TrialRequest] = {}

    def site(self) -> tuple[Hardware, Stack]:
        return self._site

    def cannot(self, config: Config, job: Job) -> str | None:
        return why_not_trainable(config, job)

    def submit(self, request: TrialRequest) -> None:
        self._running[self._thread.submit(self._runner.attempt, request)] = request

    def wait(self, timeout: float) -> list[Completed]:
        done, _ = wait(self._running, timeout=timeout, return_when=FIRST_COMPLETED)
        return [(self._running.pop(future), future.result()) for future in done]

    def close(self) -> None:
        self._runner.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
