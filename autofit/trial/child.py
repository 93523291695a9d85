"""Inside the child: run one request, answer with events on a pipe, and never let an exception out."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping
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

    def result(self, outcome: Outcome, *, recording: bool = False) -> None:
        """Say how the trial ended, and whether a recording follows that is worth waiting for."""
        self._send({"result": outcome_to_json(outcome), "recording": recording})

    def _send(self, event: Mapping[str, Any]) -> None:
        data = (json.dumps(event, allow_nan=False) + "\n").encode()
        while data:
            data = data[os.write(self._descriptor, data) :]


def run(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """Run the request in `data`; events go to the file `descriptor`. `asked_at` is in monotonic seconds."""
    events = Events(descriptor)
    process_memory.prefer_as_oom_victim()
    outcome, record = _outcome(TrialRequest.from_json(data), events, asked_at)
    # The result first: what happens to a recording must not touch it.
    events.result(outcome, recording=record is not None)
    if record is not None:
        events.enter("recording")
        record()


def _outcome(request: TrialRequest, events: Events, asked_at: float) -> tuple[Outcome, Callable[[], None] | None]:
    """The outcome, and what then makes the recordings that the request asks for; None where there are none to make."""
    from autofit.trial.measure import run_trial

    try:
        return run_trial(request, events.enter, asked_at=asked_at)
    except AutofitError as error:
        return Unsupported(reason=str(error)), None
    except Exception as error:
        failure = memory_failure(error, events.phase, host_is_device=request.job.hardware.kind == "cpu")
        if failure is not None:
            return failure, None
        text = traceback.format_exc()
        return Crashed(reason=_one_line(error), phase=events.phase, stderr_tail=text[-4000:]), None


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
