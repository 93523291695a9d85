"""Inside the child: run one request, report events on a pipe, and let no exception escape.

Where forking a warm process is unsafe, `python -m autofit.trial.process.child ENTRY DESCRIPTOR ASKED_AT` is the child,
with the request as JSON on standard input.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from autofit.core.errors import AutofitError, in_one_line
from autofit.core.outcome import Crashed, Unsupported
from autofit.trial.measure import process_memory
from autofit.trial.measure.pace import TooSlow
from autofit.trial.process.child_process import die_with_parent
from autofit.trial.process.classify import device_failure, disk_failure, memory_failure
from autofit.trial.process.events import Event, EventPipe
from autofit.trial.request import TrialRequest

if TYPE_CHECKING:
    from autofit.trial.measure.measurement import Ended


def run(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """Run the request in `data`; events go to the file descriptor `descriptor`. `asked_at` is in monotonic seconds."""
    events = EventPipe(descriptor)
    process_memory.prefer_as_oom_victim()
    request = TrialRequest.from_json({name: value for name, value in data.items() if name != "listener"})
    ended = _run(request, events, asked_at, data.get("listener"))
    # The result goes first: a failed recording must not affect it.
    events.send(Event(result=ended.outcome, recording=ended.record is not None))
    if ended.record is not None:
        events.enter("recording")
        ended.record()
    if ended.ranks is not None:
        ended.ranks.close()


def _run(request: TrialRequest, events: EventPipe, asked_at: float, listener: int | None = None) -> Ended:
    """What `run_trial` returns, or an outcome for the exception that it raises."""
    from autofit.training.distributed.ranks import NoMeeting
    from autofit.trial.measure.measurement import Ended, run_trial
    from autofit.trial.program.supervise import run_program

    try:
        if request.job.workload.program is not None:
            return Ended(outcome=run_program(request, events, asked_at=asked_at))
        return run_trial(request, events, asked_at=asked_at, listener=listener)
    except AutofitError as error:
        return Ended(outcome=Unsupported(reason=str(error)))
    except TooSlow as error:
        return Ended(outcome=error.outcome(after_seconds=time.monotonic() - asked_at, phase=events.phase))
    except NoMeeting as error:
        return Ended(outcome=Crashed(reason=str(error), phase=events.phase, transient=True))
    except Exception as error:
        failure = memory_failure(error, events.phase, host_is_device=request.job.hardware.kind == "cpu")
        text = traceback.format_exc()[-4000:]
        failure = failure or device_failure(error, events.phase) or disk_failure(error, events.phase, text)
        if failure is not None:
            return Ended(outcome=failure)
        return Ended(outcome=Crashed(reason=in_one_line(error), phase=events.phase, stderr_tail=text))


def main() -> None:
    entry, descriptor, asked_at = sys.argv[1:]
    die_with_parent()
    resolve_name(entry)(json.load(sys.stdin), int(descriptor), float(asked_at))


if __name__ == "__main__":
    main()
