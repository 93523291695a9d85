"""How long a trial goes on: until it is beaten, or too dear for what it may gain, unless it has earned more."""

from __future__ import annotations

import pytest

from autofit.techniques import complete
from autofit.trial.measure.pace import (
    UNSTEADY,
    Pace,
    TooSlow,
    least_repeats,
    makes_kernels,
    running_seconds,
    useful_speed,
    warm_ups,
)
from autofit.trial.request import Rival


def pace(*rivals: float, allowance: float | None = None, least: float = 0.0) -> Pace:
    """Of a trial with 1,000 tokens and 10 micro-steps a step, beside rivals of so many tokens per second."""
    return Pace(
        tokens_per_step=1000,
        accumulation=10,
        rivals=tuple(Rival(device_bytes=1, tokens_per_second=speed) for speed in rivals),
        allowance_seconds=allowance,
        least_tokens_per_second=least,
    )


def ends(trial: Pace, micro_seconds: float, *, elapsed: float = 20.0, left: float = 4.0) -> TooSlow | None:
    """Why it ends after a micro-step of so many seconds; None if it goes on."""
    try:
        trial.judge(2, micro_seconds / UNSTEADY, elapsed_seconds=elapsed, micro_steps_left=left)
    except TooSlow as too_slow:
        return too_slow
    return None


def test_a_trial_that_is_beaten_many_times_over_ends() -> None:
    """At 1 s a micro-step it trains 100 tokens/s at most."""
    assert ends(pace(50.0, 399.0), 1.0) is None
    too_slow = ends(pace(50.0, 401.0), 1.0)
    assert too_slow is not None and too_slow.least_step_seconds == 10.0
    outcome = too_slow.outcome(after_seconds=21.0, phase="warm-up")
    assert (outcome.least_step_seconds, outcome.deadline_seconds, outcome.phase) == (10.0, 21.0, "warm-up")
    assert "another config is 4 times as fast" in outcome.reason


def test_only_a_later_micro_step_proves_a_bound() -> None:
    """The first one may have generated kernels for minutes."""
    with pytest.raises(TooSlow) as first:
        pace(10.0**9).judge(1, 100.0, elapsed_seconds=120.0, micro_steps_left=4.0)
    later = ends(pace(10.0**9), 100.0)
    assert later is not None
    proven = [too_slow.outcome(after_seconds=120.0).is_proven for too_slow in (first.value, later)]
    assert proven == [False, True]


def test_a_trial_whose_method_would_not_be_practical_ends() -> None:
    """At 1 s a micro-step it trains 100 tokens/s at most."""
    assert ends(pace(least=99.0), 1.0) is None
    too_slow = ends(pace(50.0, least=101.0), 1.0)
    assert too_slow is not None and too_slow.least_step_seconds == 10.0
    assert "not practical" in str(too_slow)
    assert useful_speed([], 0.0) == 0.0 and useful_speed([400.0, 40.0], 50.0) == 100.0


def test_a_trial_that_would_cost_more_than_it_is_worth_ends_also_as_the_first_of_all() -> None:
    assert ends(pace(allowance=60.0), 9.9) is None
    too_slow = ends(pace(allowance=60.0), 10.1)
    assert too_slow is not None and too_slow.least_step_seconds == pytest.approx(101.0)
    assert ends(pace(allowance=None), 1000.0) is None, "without an allowance it may take what it needs"


def test_a_trial_that_may_beat_every_rival_has_earned_what_it_needs() -> None:
    trial = pace(50.0, 79.0, allowance=60.0)
    assert ends(trial, 1.0, left=1000.0) is None and trial.earned
    assert ends(trial, 2.0, left=1000.0) is None, "what is earned stays so"
    assert ends(pace(50.0, 81.0, allowance=60.0), 1.0, left=1000.0) is not None, "single steps scatter"
    assert ends(trial, 10.0) is not None, "but not once it is beaten"


def test_a_first_micro_step_earns_by_what_it_took_and_ends_by_what_it_must_take() -> None:
    """Of 6 s it may have spent 5 on what happens once: that it is the fastest is not shown by what is left."""
    trial = pace(50.0, allowance=60.0)
    trial.judge(1, 6.0, elapsed_seconds=20.0, micro_steps_left=4.0)
    assert not trial.earned
    trial.judge(2, 1.5, elapsed_seconds=20.0, micro_steps_left=4.0)
    assert trial.earned


def test_a_micro_step_that_shows_nothing_ends_no_trial() -> None:
    """The first one may spend all of its seconds on what happens once."""
    assert ends(pace(10.0**9, allowance=1.0), 0.0) is None


def test_long_steps_are_warmed_up_and_timed_fewer_times() -> None:
    seconds = [0.01, 1.0, 3.0, 4.0, 6.0, 60.0]
    assert [warm_ups(s) for s in seconds] == [2, 2, 2, 2, 1, 1]
    assert [least_repeats(s) for s in seconds] == [3, 3, 3, 2, 1, 1]
    assert running_seconds(60.0, 3.0) == 120.0
    assert running_seconds(60.0, 3.0, micro_steps=2) == 90.0, "the warm-up is one micro-step"
    assert running_seconds(4.0, 3.0, micro_steps=2) == running_seconds(4.0, 3.0), "these are short"
    assert running_seconds(0.01, 3.0) == pytest.approx(3.02), "short ones are repeated for as long as they are given"


def test_where_triton_or_inductor_makes_kernels_first_the_first_step_says_nothing() -> None:
    made = ({"compile": True}, {"loss": "fused"}, {"kernels": "liger"})
    assert all(makes_kernels(complete(values)) for values in made)
    assert not makes_kernels(complete({"loss": "chunked"}))
