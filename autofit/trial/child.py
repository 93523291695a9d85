"""Inside the child: run one request, answer with events on a pipe, and never let an exception out."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping
from typing import Any

from autofit.errors import AutofitError
from autofit.outcome import Crashed, Outcome, Unsupported, outcome_to_json
from autofit.trial import process_memory
from autofit.trial.classify import memory_failure
from autofit.trial.request import TrialRequest


class Events:
    """Lines of JSON to the parent. Standard output is left to whatever a library prints."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.phase = "start"

    def enter(self, phase: str) -> None:
        """Say which phase begins, so that the parent knows where a killed child was."""
        if phase != self.phase:
            self.phase = phase
            self._send({"phase": phase, "room": process_memory.room()})

    def result(self, outcome: Outcome) -> None:
        """Say how the trial ended."""
        self._send({"result": outcome_to_json(outcome)})

    def _send(self, event: Mapping[str, Any]) -> None:
        data = (json.dumps(event, allow_nan=False) + "\n").encode()
        while data:
            data = data[os.write(self._descriptor, data) :]


def run(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """Run the request in `data`; events go to the file `descriptor`. `asked_at` is in monotonic seconds."""
    events = Events(descriptor)
    process_memory.prefer_as_oom_victim()
    events.result(_outcome(TrialRequest.from_json(data), events, asked_at))


def _outcome(request: TrialRequest, events: Events, asked_at: float) -> Outcome:
    from autofit.trial.measure import run_trial

    try:
        return run_trial(request, events.enter, asked_at=asked_at)
    except AutofitError as error:
        return Unsupported(reason=str(error))
    except Exception as error:
        failure = memory_failure(error, events.phase, host_is_device=request.job.hardware.kind == "cpu")
        if failure is not None:
            return failure
        text = traceback.format_exc()
        return Crashed(reason=_one_line(error), phase=events.phase, stderr_tail=text[-4000:])


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
