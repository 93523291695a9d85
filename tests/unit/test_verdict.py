"""What several attempts of a config mean together: which one settles it under a limit, and which a frontier shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.operations.made_trials import crashed, fits, make_trial, out_of_memory

from autofit.core.device.state import CardState, DeviceState
from autofit.core.outcome import Crashed, Diverged, Fits, Outcome, OutOfMemory, TimedOut, Trial
from autofit.core.units import GIB
from autofit.core.verdict import contradiction, standing, verdict

TIMED_OUT = TimedOut(reason="no end within 600 s", deadline_seconds=600.0)
MACHINERY = Crashed(reason="the worker was lost, twice", transient=True)
DIVERGED = Diverged(reason="the loss is not finite", losses=(10.8, None))
HOST = OutOfMemory(reason="cannot allocate memory", host=True)


def at(limit: float, outcome: Outcome) -> Trial:
    """A trial under a limit in GiB."""
    return make_trial({"method": "full", "micro_batch": 1}, outcome, limit=int(limit * GIB))


def early(gib: float, speed: float) -> Fits:
    """A trial that was stopped after its first repeat."""
    return Fits(measurement=replace(fits(gib, speed).measurement, stopped_early=True))


@pytest.mark.parametrize(
    ("ran_under", "outcome", "limit", "answers"),
    [
        # What fitted answers for every limit that holds what it took.
        (10, fits(4, 100), 10, True),
        (10, fits(4, 100), 80, True),
        (10, fits(4, 100), 4, True),
        # Reserved memory shrinks where there is less: between what was allocated and what was reserved nobody knows.
        (10, fits(4, 100, allocated=3), 3.5, False),
        (10, fits(4, 100, allocated=3), 3, False),
        # What was allocated is needed.
        (10, fits(4, 100, allocated=3), 2.9, True),
        # What did not fit answers for every limit that is no higher.
        (10, out_of_memory(), 10, True),
        (10, out_of_memory(), 5, True),
        (10, out_of_memory(), 10.1, False),
        # Other failures answer for their own limit alone.
        (10, crashed(), 10, True),
        (10, crashed(), 9, False),
        (10, crashed(), 11, False),
        (10, TIMED_OUT, 10, True),
        (10, TIMED_OUT, 11, False),
        # Killed sooner than it would be now, it might have ended.
        (10, TimedOut(reason="no end within 30 s", deadline_seconds=30.0), 10, False),
        (10, TimedOut(reason="no end within 900 s", deadline_seconds=900.0), 10, True),
        # What the machinery failed says nothing of the config.
        (10, MACHINERY, 10, False),
        # What trains something else does so under any limit.
        (10, DIVERGED, 10, True),
        (10, DIVERGED, 11, True),
        (10, DIVERGED, 9, True),
    ],
)
def test_one_trial(ran_under: float, outcome: Outcome, limit: float, answers: bool) -> None:
    trial = at(ran_under, outcome)
    assert verdict([trial], int(limit * GIB)) == (trial if answers else None)


def test_nothing_known() -> None:
    assert verdict([], GIB) is None


def test_the_latest_attempt_counts() -> None:
    first, second = at(10, fits(4, 100)), at(10, fits(4, 90))
    assert verdict([first, second], 10 * GIB) == second
    failed = at(10, out_of_memory())
    assert verdict([first, failed], 10 * GIB) == failed
    gone = at(10, crashed())
    assert verdict([first, gone], 10 * GIB) == gone
    assert verdict([gone, first], 10 * GIB) == first


def test_a_trial_that_was_given_less_time_than_usual_does_not_unseat_one_that_fitted() -> None:
    fitted, hurried = at(10, fits(4, 100)), at(10, TimedOut(reason="no end within 30 s", deadline_seconds=30.0))
    for deadline in (10.0, 600.0):
        assert verdict([fitted, hurried], 10 * GIB, deadline) == fitted
    assert verdict([hurried], 10 * GIB, 10.0) == hurried
    assert verdict([fitted, at(10, TIMED_OUT)], 10 * GIB, 10.0).outcome == TIMED_OUT
    assert verdict([at(10, crashed()), hurried], 10 * GIB, 10.0) == hurried


def test_what_ran_out_of_memory_is_believed_until_two_trials_in_full_have_fitted() -> None:
    first, second, failed = at(10, fits(4, 100)), at(10, fits(4, 90)), at(10, out_of_memory())
    for attempts in (
        [failed, first],
        [first, failed, second],
        [first, second, failed],
        [failed, first, failed, second],
    ):
        assert verdict(attempts, 10 * GIB) == failed
        assert contradiction(attempts, 10 * GIB) is not None
    assert verdict([failed, first, at(10, early(4, 80))], 10 * GIB) == failed
    assert verdict([failed, first, second], 10 * GIB) == second
    assert contradiction([failed, first, second], 10 * GIB) is None
    assert verdict([failed, at(20, fits(4, 100)), at(20, fits(4, 90))], 10 * GIB) == failed, "they had more memory"
    # Nor are trials under other limits forgotten, each for the limits that it speaks of.
    tight = at(5, out_of_memory())
    assert verdict([tight, first], 5 * GIB) == tight
    assert verdict([tight, first], 6 * GIB) == first
    loose = at(10, fits(6, 100, allocated=4))
    assert verdict([tight, failed, loose, loose, first], 5 * GIB) == failed
    assert verdict([tight, failed, loose, loose, first], 6 * GIB) == first


def test_a_contradiction_names_the_trials_of_both_kinds() -> None:
    first, failed, heavy = at(10, fits(4, 100)), at(8, out_of_memory()), at(20, fits(9, 100))
    result = contradiction([first, failed, heavy])
    assert result is not None and (result.fitted, result.ran_out) == ((first,), (failed,))
    assert contradiction([failed, heavy]) is None, "it takes more than it had where it ran out"
    assert contradiction([first, failed], 9 * GIB) is None, "nothing contradicts that it fits more than it had"
    assert contradiction([first, failed], 3 * GIB) is None, "nobody says that it fits less than it took"
    assert contradiction([first, at(8, HOST)]) is None, "a host's memory is another one"
    assert contradiction([first, at(8, early(4, 90)), at(8, crashed())]) is None


def test_an_attempt_that_says_nothing_leaves_the_word_to_earlier_ones() -> None:
    fitted, failed = at(10, fits(4, 100)), at(3, out_of_memory())
    assert verdict([fitted, failed], 10 * GIB) == fitted
    assert verdict([failed, at(10, fits(4, 100, allocated=2))], 3 * GIB) == failed
    assert verdict([fitted, at(20, crashed())], 10 * GIB) == fitted


def test_what_was_stopped_early_gives_way_to_what_was_timed_in_full() -> None:
    full, brief, failed = at(10, fits(4, 100)), at(10, early(4, 80)), at(10, crashed())
    assert verdict([brief], 10 * GIB) == brief
    assert verdict([full, brief], 10 * GIB) == full
    assert verdict([brief, full], 10 * GIB) == full
    # A failure after the full trial refutes it; the brief one, still later, has fitted again.
    assert verdict([full, failed, brief], 10 * GIB) == brief
    assert verdict([full, brief, failed], 10 * GIB) == failed


@given(st.lists(st.tuples(st.sampled_from(["fits", "oom"]), st.integers(1, 20)), max_size=6), st.integers(1, 20))
def test_a_verdict_is_of_the_latest_trial_that_speaks_of_the_limit(runs: list[tuple[str, int]], limit: int) -> None:
    trials = [at(gib, out_of_memory() if kind == "oom" else fits(gib, 100)) for kind, gib in runs]
    result = verdict(trials, limit * GIB)
    believed = [
        gib
        for number, (kind, gib) in enumerate(runs)
        if kind == "oom" and gib >= limit and sum(k == "fits" and g <= gib for k, g in runs[number + 1 :]) < 2
    ]
    speaks = [t for t, (kind, gib) in zip(trials, runs, strict=True) if (kind == "fits" and (
        (gib <= limit and not believed) or 0.9 * gib > limit)) or (kind == "oom" and gib >= limit)]  # fmt: skip
    assert result == (speaks[-1] if speaks else None)
    contradictory = contradiction(trials, limit * GIB) is not None
    assert contradictory == bool(believed and any(kind == "fits" and gib <= limit for kind, gib in runs))


def test_the_verdict_prefers_a_clean_attempt() -> None:
    def tried(outcome: Outcome, state: DeviceState | None) -> Trial:
        return replace(at(10, outcome), device_state=state)

    quiet = DeviceState(seconds=10.0, cards=(CardState(uuid="GPU-a", others_share=0.0),))
    shared = DeviceState(seconds=10.0, cards=(CardState(uuid="GPU-a", others_share=0.5),))
    clean, busy, late = tried(fits(4, 100), quiet), tried(fits(4, 60), shared), tried(TIMED_OUT, shared)
    assert verdict([clean, busy, late], 10 * GIB) == clean
    assert verdict([busy, clean], 10 * GIB) == clean
    assert verdict([busy, late], 10 * GIB) == busy
    assert verdict([late], 10 * GIB) is None
    unobserved = tried(fits(4, 50), None)
    assert verdict([unobserved, busy], 10 * GIB) == unobserved
    failed = tried(out_of_memory(), shared)
    assert verdict([clean, failed], 10 * GIB) == failed, "its memory counts"


def test_what_fitted_before_the_host_ran_out_must_show_it_again() -> None:
    first, ran_out, again = at(10, fits(4, 100)), at(10, HOST), at(10, fits(4, 90))
    assert verdict([ran_out], 10 * GIB) is None
    assert verdict([first, ran_out], 10 * GIB) is None
    assert verdict([first, ran_out, again], 10 * GIB) == again
    assert verdict([first, at(9, HOST)], 10 * GIB) == first, "it had less"


@pytest.mark.parametrize(
    "outcome", [fits(4, 100, allocated=3), early(4, 100), out_of_memory(), HOST, crashed(), DIVERGED]
)
@pytest.mark.parametrize("limit", [0.0, 2.0, 3.5, 4.0, 10.0])
def test_one_attempt_stands_as_among_others_that_say_nothing(outcome: Outcome, limit: float) -> None:
    for state in (None, DeviceState(seconds=1.0, set_aside="slower than others of its type")):
        trial = replace(at(10, outcome), device_state=state)
        assert standing([trial], int(limit * GIB)) == standing([at(10, MACHINERY), trial], int(limit * GIB))


def test_a_frontier_shows_what_settles_a_config_within_the_limit_or_else_beyond_it() -> None:
    light, heavy, failed = at(10, fits(4, 100)), at(20, fits(12, 200)), at(10, out_of_memory())
    assert standing([light]) == standing([light], 4 * GIB) == light
    assert standing([light, failed]) is None
    assert standing([heavy, failed]) == standing([failed, heavy]) == heavy, "it was given more"
    assert standing([heavy, failed], 10 * GIB) == heavy, "how far it is beyond the limit is of interest"
    assert standing([heavy, light], 10 * GIB) == light
    # What fits within the limit is no point beyond it, whatever that limit makes of it.
    assert standing([light, at(20, fits(4, 90)), at(9, crashed())], 9 * GIB) is None
    unsure = at(10, fits(6, 100, allocated=4))
    assert verdict([unsure], 5 * GIB) is None and standing([unsure], 5 * GIB) == unsure
    more_than_allowed = at(3, fits(4, 100))
    assert standing([more_than_allowed]) == standing([more_than_allowed], 3 * GIB) == more_than_allowed
