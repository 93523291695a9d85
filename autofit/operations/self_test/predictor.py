"""Estimates made by a process of their own: a trace that crashes or hangs costs one figure, and no device is touched.

Run as `python -m autofit.operations.self_test.predictor`: one trial request per line on standard input, one estimate or
error per line on standard output.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
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
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process now, so that its imports overlap with other work."""
        if self._process is None or self._process.poll() is not None:
            # Traces run on fake processors: importing bitsandbytes would take memory of a device that it sees.
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )

    def estimate(self, request: TrialRequest, *, seconds: float) -> dict[str, Any]:
        """The request's config under its limit, as `Estimate.to_json`. Raises `NotPredicted`, and after
        `seconds` `TooLate`."""
        self.start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request.to_json()) + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, seconds))
            answer = process.stdout.readline() if ready else ""
        except (OSError, ValueError):  # it died, or was closed meanwhile
            answer, ready = "", [process.stdout]
        if not answer:
            self.close()
            if not ready:
                raise TooLate(f"no estimate after {max(0.0, seconds):.0f} s")
            raise NotPredicted("the estimator's process ended")
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise NotPredicted(found["error"])
        return found

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                try:
                    pipe.close()
                except OSError:  # what it had not read yet
                    continue


def main() -> None:
    """Answer requests until standard input closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with answers
    from autofit.estimate.estimator import Estimator
    from autofit.estimate.time.roofline import prior

    estimators: dict[str, Estimator] = {}
    for line in sys.stdin:
        try:
            request = TrialRequest.from_json(json.loads(line))
            key = request.job.workload.key
            if key not in estimators:
                estimators[key] = Estimator(request.job, prior(request.job.hardware))
            found = estimators[key].estimate(request.config, memory_limit_bytes=request.memory_limit_bytes)
            answer = json.dumps(found.to_json())
        except Exception as error:  # whatever a trace raises
            answer = json.dumps({"error": in_one_line(error)})
        answers.write(answer + "\n")


if __name__ == "__main__":
    main()
