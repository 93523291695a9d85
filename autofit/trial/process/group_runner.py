"""Trials of several ranks on this machine, each rank run by its own device's fork server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace

from autofit.core.outcome import Crashed
from autofit.training.distributed.rendezvous import LOOPBACK, Rendezvous
from autofit.trial.attempt import Attempt
from autofit.trial.machine import device_lock
from autofit.trial.process.fork_server import DEFAULT_ENTRY
from autofit.trial.process.group import GroupAnswers
from autofit.trial.process.runner import TrialRunner
from autofit.trial.request import TrialRequest

_log = logging.getLogger(__name__)


def tell_of_waiting(holder: int | None) -> None:
    """Log that a trial waits for another process's, whose number is `holder` if it is known."""
    holder_text = "" if holder is None else f" (pid {holder})"
    _log.warning("autofit: waiting for another autofit trial on this device%s", holder_text)


def not_begun(reason: str) -> Attempt:
    """The attempt of a trial that waited in vain for its device, or could not meet its ranks."""
    return Attempt(outcome=Crashed(reason=reason, transient=True), seconds=0.0)


def when_free(
    devices: Sequence[str],
    request: TrialRequest,
    run: Callable[[TrialRequest], Attempt],
    *,
    waiting: device_lock.Waiting,
    unwanted: Callable[[], bool] = lambda: False,
) -> Attempt:
    """What `run` makes of a request once no other process runs a trial on any of `devices`, which are then held. The
    other arguments are those of `device_lock.held`."""
    try:
        with device_lock.held(devices, waiting=waiting, unwanted=unwanted, most_seconds=request.wait_seconds) as waited:
            return replace(run(request.after_waiting(waited)), waited_seconds=waited)
    except device_lock.GivenUp as error:
        return not_begun(str(error))


class GroupRunner:
    """Runs trials one after another, each on the same `ranks` devices. Used from one thread, except for `interrupt` and
    `close`."""

    def __init__(self, *, kind: str = "cpu", ranks: int = 1, entry: str = DEFAULT_ENTRY) -> None:
        self._kind = kind
        self._closed = threading.Event()
        self._runners = [TrialRunner(kind=kind, device=rank, entry=entry) for rank in range(ranks)]

    def start(self) -> None:
        for runner in self._runners:
            runner.start()

    def attempt(self, request: TrialRequest) -> Attempt:
        """Run `request`, once no other process runs a trial on any of the devices. A trial's failure never raises."""
        devices = device_lock.names(self._kind, len(self._runners))
        return when_free(devices, request, self._attempt, waiting=tell_of_waiting, unwanted=self._closed.is_set)

    def _attempt(self, request: TrialRequest) -> Attempt:
        ranks = len(self._runners)
        if ranks == 1:
            return self._runners[0].attempt(request)
        self.start()
        try:
            port = self._runners[0].listen(LOOPBACK)
        except OSError as error:
            return not_begun(f"the ranks cannot meet: {error}")
        answers = GroupAnswers(ranks=ranks)
        with ThreadPoolExecutor(ranks, thread_name_prefix="autofit-rank") as threads:
            running = {}
            for rank, runner in enumerate(self._runners):
                place = Rendezvous(rank=rank, ranks=ranks, ranks_here=ranks, host=LOOPBACK, port=port)
                running[threads.submit(runner.attempt, replace(request, rendezvous=place))] = rank
            try:
                while running:
                    done, _ = wait(running, timeout=answers.grace_left, return_when=FIRST_COMPLETED)
                    for future in done:
                        answers.take(running.pop(future), future.result())
                    for rank in answers.overdue():
                        self._runners[rank].stop()
            except BaseException:
                self.close()  # nobody wants the trial any more, but the threads wait for it
                raise
        return answers.attempt()

    def interrupt(self) -> None:
        """End the running trial, if there is one, at once: its outcome is a `TimedOut` with what it has shown. For
        another thread to call."""
        for runner in self._runners:
            runner.stop(interrupted=True)

    def close(self) -> None:
        """End the parents and any trial they run, or that waits for its device."""
        self._closed.set()
        for runner in self._runners:
            runner.hang_up()
        for runner in self._runners:
            runner.close()

    def __enter__(self) -> GroupRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
