"""Estimates made by a process of its own: a trace that crashes or hangs costs one figure, and touches no device."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

from autofit.core.errors import AutofitError, in_one_line
from autofit.trial.request import TrialRequest


class NotPredicted(AutofitError):
    """No estimate was made; the message says why."""


class TooLate(NotPredicted):
    """There was no time for it, which says nothing about the estimator."""


class Predictor:
    """Asks the process, which is started when first needed and again after it has failed. Used from one thread, except
    for `close`."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None

    def start(self) -> None:
        if self._process is None or not self._process.is_alive():
            spawning = multiprocessing.get_context("spawn")
            self._answers, theirs = spawning.Pipe()
            self._process = spawning.Process(target=_answer, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()

    def estimate(self, request: TrialRequest, *, seconds: float) -> dict[str, Any]:
        """The request's config under its limit, as `Estimate.to_json`. Raises `NotPredicted`, and after
        `seconds` `TooLate`."""
        self.start()
        seconds = max(0.0, seconds)
        try:
            self._answers.send(request)
            if not self._answers.poll(seconds):
                self.close()
                raise TooLate(f"no estimate after {seconds:.0f} s")
            found: dict[str, Any] = self._answers.recv()
        except (EOFError, OSError, ValueError):  # it died, or was closed meanwhile
            self.close()
            raise NotPredicted("the estimator's process ended") from None
        if "error" in found:
            raise NotPredicted(found["error"])
        return found

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join()
            self._answers.close()


def _answer(asked: Connection) -> None:
    """Answer requests until the pipe closes."""
    # Traces run on fake processors: importing bitsandbytes would take memory of a device that it sees.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)  # what libraries print must not mix with the command's own output
    os.dup2(silent, 2)
    from autofit.estimate.estimator import Estimator
    from autofit.estimate.time.guessed_rates import prior

    estimators: dict[str, Estimator] = {}
    while True:
        try:
            request: TrialRequest = asked.recv()
        except EOFError:
            return
        try:
            key = request.job.workload.key
            if key not in estimators:
                estimators[key] = Estimator(request.job, prior(request.job.hardware))
            asked.send(
                estimators[key].estimate(request.config, memory_limit_bytes=request.memory_limit_bytes).to_json()
            )
        except Exception as error:  # whatever a trace raises
            asked.send({"error": in_one_line(error)})
