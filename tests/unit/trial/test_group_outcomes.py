"""Of several ranks' outcomes the cause is told, whatever came first."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from unit.operations.made_trials import fits

from autofit.core.outcome import (
    Crashed,
    Diverged,
    Fits,
    Measurement,
    Outcome,
    OutOfMemory,
    RankMeasurement,
    StepSeconds,
    TimedOut,
    outcome_from_json,
)
from autofit.trial.attempt import Attempt
from autofit.trial.process import classify, group
from autofit.trial.process.group import GroupAnswers, combined

ALONE = fits(1.0, 100.0)
LOST = Crashed(reason="RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:3612")
NCCL = Crashed(reason="the trial's process died of SIGABRT", signal="SIGABRT", stderr_tail="[Rank 0] NCCL watchdog")
GLOO = Crashed(
    reason="the trial's process exited with status 1 and no result",
    exit_code=1,
    stderr_tail="RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:27777",
)
STOPPED = classify.stopped("backward")
OUT = OutOfMemory(reason="Tried to allocate 2 GiB", phase="forward")
BROKEN = Crashed(reason="ValueError: kaboom", stderr_tail="NCCL version 2.27.3")
KILLED = Crashed(reason="the trial was killed", signal="SIGKILL", transient=True)
DIVERGED = Diverged(reason="the loss of step 1 is not finite")


def measured(rank: int, *, device_bytes: int, seconds: float) -> Fits:
    made: Measurement = ALONE.measurement
    of_rank = RankMeasurement(
        rank=rank,
        peak_allocated_bytes=device_bytes - 2,
        peak_reserved_bytes=device_bytes - 1,
        device_bytes=device_bytes,
        host_peak_bytes=device_bytes + 1,
        step_seconds=seconds,
    )
    slow = StepSeconds(median=2.0, p95=2.0, relative_spread=None)
    peaks = {"peak_allocated_bytes": device_bytes - 2, "peak_reserved_bytes": device_bytes - 1}
    return Fits(
        measurement=replace(
            made,
            **peaks,
            device_bytes=device_bytes,
            host_peak_bytes=device_bytes + 1,
            step_seconds=slow,
            phase_peaks=dict.fromkeys(("forward", "backward", "optimizer"), device_bytes),
            ranks=(of_rank,),
        )
    )


def test_memory_is_that_of_the_fullest_rank_and_each_is_kept() -> None:
    outcome = combined({1: measured(1, device_bytes=300, seconds=1.0), 0: measured(0, device_bytes=200, seconds=2.0)})
    assert isinstance(outcome, Fits)
    measurement = outcome.measurement
    assert (measurement.peak_allocated_bytes, measurement.peak_reserved_bytes, measurement.device_bytes) == (
        298,
        299,
        300,
    )
    assert measurement.host_peak_bytes == 301
    assert set(measurement.phase_peaks.values()) == {300}
    assert [(of_rank.rank, of_rank.device_bytes, of_rank.step_seconds) for of_rank in measurement.ranks] == [
        (0, 200, 2.0),
        (1, 300, 1.0),
    ]
    assert outcome_from_json(outcome.to_json()) == outcome


def test_a_measurement_of_one_process_has_no_ranks_and_older_ones_are_still_read() -> None:
    data = ALONE.to_json()
    del data["measurement"]["ranks"]
    assert outcome_from_json(data) == ALONE


@pytest.mark.parametrize(
    ("answers", "cause", "reason"),
    [
        ({0: LOST, 1: OUT}, OUT, "rank 1: Tried to allocate 2 GiB"),
        ({0: KILLED, 1: OUT}, OUT, "rank 1: Tried to allocate 2 GiB"),
        ({1: LOST, 0: BROKEN, 2: STOPPED}, BROKEN, "rank 0: ValueError: kaboom"),
        ({0: NCCL, 1: KILLED}, KILLED, "rank 1: the trial was killed"),
        ({0: GLOO, 1: BROKEN}, BROKEN, "rank 1: ValueError: kaboom"),
        ({0: ALONE, 1: BROKEN}, BROKEN, "rank 1: ValueError: kaboom"),
        ({0: STOPPED, 1: LOST, 2: DIVERGED}, DIVERGED, "rank 2: the loss of step 1 is not finite"),
        ({1: DIVERGED, 0: BROKEN}, DIVERGED, "rank 1: the loss of step 1 is not finite"),
    ],
)
def test_the_cause_is_told_with_its_rank(answers: dict[int, Outcome], cause: Outcome, reason: str) -> None:
    assert combined(answers) == replace(cause, reason=reason)  # type: ignore[arg-type]


def test_a_connection_that_breaks_between_sound_ranks_is_no_fault_of_the_config() -> None:
    outcome = combined({0: LOST, 1: STOPPED})
    assert isinstance(outcome, Crashed) and outcome.transient
    assert outcome.reason.startswith("rank 0: ")


@pytest.mark.parametrize(
    ("entered", "reason"),
    [
        ((9, 8), "rank 1: not finished after 5 s, in phase forward (rank 0 waiting in phase backward)"),
        ((8, 8), "rank 0: not finished after 5 s, in phase backward; rank 1: not finished after 5 s, in phase forward"),
    ],
)
def test_who_got_least_far_hangs(entered: tuple[int, int], reason: str) -> None:
    answers: dict[int, Outcome] = {
        rank: classify.timed_out(deadline_seconds=5.0, phase=phase, phases_entered=count)
        for rank, phase, count in zip((0, 1), ("backward", "forward"), entered, strict=True)
    }
    outcome = combined(answers)
    assert isinstance(outcome, TimedOut) and outcome.reason == reason
    assert combined({**answers, 2: LOST}) != outcome, "who lost its peers had waited for them"


def test_the_others_have_a_moment_to_say_what_they_met(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(group, "time", SimpleNamespace(monotonic=lambda: now))
    answers = GroupAnswers(ranks=3)
    answers.take(2, Attempt(outcome=ALONE, seconds=1.0))
    assert answers.grace_left is None and answers.overdue() == []
    answers.take(0, Attempt(outcome=OUT, seconds=3.0))
    assert answers.overdue() == [] and answers.grace_left == group.GRACE_SECONDS
    now += group.GRACE_SECONDS + 0.1
    assert answers.overdue() == [1]
    assert answers.overdue() == [] and answers.grace_left is None, "each is named once"
    answers.take(1, Attempt(outcome=STOPPED, seconds=2.0))
    assert answers.complete and answers.attempt().seconds == 3.0
    assert answers.attempt().outcome == replace(OUT, reason="rank 0: Tried to allocate 2 GiB")
