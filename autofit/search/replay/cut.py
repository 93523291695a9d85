"""How a recorded trial would have ended under the request of a search: the one place that knows when trials are cut."""

from __future__ import annotations

from dataclasses import replace

from autofit.outcome import Fits, TimedOut, Trial
from autofit.search.replay.timeline import Timeline
from autofit.trial.pace import ONCE_SECONDS, Pace, TooSlow, least_seconds
from autofit.trial.request import TrialRequest


def cut(trial: Trial, request: TrialRequest) -> Trial:
    """`trial` as it is where it would have ended by itself; else as its pace or its deadline would have ended it.

    Then its outcome is `TimedOut`, with what its micro-steps had shown until then of a whole step's time, and it has
    cost the seconds until then.
    """
    if not isinstance(trial.outcome, Fits):
        return _killed(trial, request.deadline_seconds)
    line = Timeline.of(trial)
    pace = Pace.of(request, line.accumulation)
    elapsed, watched, shown = line.before_seconds, line.warm_ups * line.micro_steps, 0.0
    for number in range(1, watched + 1):
        ends = _ends(pace, request)
        if elapsed + line.micro_step_seconds > ends:
            begun = line.accumulation * max(0.0, ends - elapsed - ONCE_SECONDS)
            return _killed(trial, ends, max(shown, begun) or None, is_proven=shown > begun)
        elapsed += line.micro_step_seconds
        try:
            pace.judge(
                number,
                line.micro_step_seconds,
                elapsed_seconds=elapsed,
                micro_steps_left=max(0, line.micro_steps - number) + line.micro_steps,
            )
        except TooSlow as found:
            return replace(trial, outcome=found.outcome(after_seconds=elapsed), seconds=elapsed)
        if number > 1:
            shown = line.accumulation * least_seconds(number, line.micro_step_seconds)
    return _killed(trial, _ends(pace, request), shown or None, is_proven=shown > 0.0)


def _ends(pace: Pace, request: TrialRequest) -> float:
    """Seconds after which the trial is killed, as far as its pace has shown."""
    if pace.earned or pace.allowance_seconds is None:
        return request.deadline_seconds
    return min(request.deadline_seconds, pace.allowance_seconds)


def _killed(
    trial: Trial, after_seconds: float, least_step_seconds: float | None = None, *, is_proven: bool = False
) -> Trial:
    if trial.seconds <= after_seconds:
        return trial
    outcome = TimedOut(
        reason=f"not done after its {after_seconds:.0f} s",
        deadline_seconds=after_seconds,
        least_step_seconds=least_step_seconds,
        is_proven=is_proven,
    )
    return replace(trial, outcome=outcome, seconds=after_seconds)
