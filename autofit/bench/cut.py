"""How a recorded trial would have ended under the request of a search: the one place that knows when trials are cut."""

from __future__ import annotations

from dataclasses import replace

from autofit.core.outcome import Fits, TimedOut, Trial
from autofit.trial.measure.pace import ONCE_SECONDS, Pace, TooSlow, least_seconds, micro_steps_run, warm_ups
from autofit.trial.request import TrialRequest


def cut(trial: Trial, request: TrialRequest) -> Trial:
    """`trial` as it is where it would have ended by itself; else as its pace or its deadline would have ended it.

    Then its outcome is `TimedOut`, with what its micro-steps had shown until then of a whole step's time, and it has
    cost the seconds until then. Its steps take what was measured of them, each micro-step an equal share of its step;
    the rest of its seconds came before. Where a busy moment made its median longer than that leaves room for, all of
    its seconds were steps.
    """
    if not isinstance(trial.outcome, Fits):
        return _killed(trial, request.deadline_seconds)
    median, timed = trial.outcome.measurement.step_seconds.median, trial.outcome.measurement.steps
    accumulation = trial.workload.batch_per_device // trial.config.number("micro_batch")
    micro_steps = micro_steps_run(accumulation, trial.config)
    watched = micro_steps * warm_ups(median * micro_steps / accumulation)
    ran = watched + micro_steps * timed
    micro_seconds = min(median / accumulation, trial.seconds / ran)
    elapsed, shown = max(0.0, trial.seconds - ran * micro_seconds), 0.0
    pace = Pace.of(request, accumulation)
    for number in range(1, watched + 1):
        ends = _ends(pace, request)
        if elapsed + micro_seconds > ends:
            begun = accumulation * max(0.0, ends - elapsed - ONCE_SECONDS)
            return _killed(trial, ends, max(shown, begun) or None, is_proven=shown > begun)
        elapsed += micro_seconds
        left = max(0, micro_steps - number) + micro_steps
        try:
            pace.judge(number, micro_seconds, elapsed_seconds=elapsed, micro_steps_left=left)
        except TooSlow as slow:
            return replace(trial, outcome=slow.outcome(after_seconds=elapsed), seconds=elapsed)
        if number > 1:
            shown = accumulation * least_seconds(number, micro_seconds)
    return _killed(trial, _ends(pace, request), shown or None, is_proven=shown > 0.0)


def _ends(pace: Pace, request: TrialRequest) -> float:
    """Seconds after which the trial is killed, as far as its pace has shown."""
    if pace.earned or pace.allowance_seconds is None:
        return request.deadline_seconds
    return min(request.deadline_seconds, pace.allowance_seconds)


def _killed(trial: Trial, after: float, least_step_seconds: float | None = None, *, is_proven: bool = False) -> Trial:
    if trial.seconds <= after:
        return trial
    outcome = TimedOut(
        reason=f"not done after its {after:.0f} s",
        deadline_seconds=after,
        least_step_seconds=least_step_seconds,
        is_proven=is_proven,
    )
    return replace(trial, outcome=outcome, seconds=after)
