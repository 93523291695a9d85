"""What trials say about configs: which stored trial answers under a limit, and what a failure rules out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.operations.made_trials import crashed, fits, make_job, make_trial, out_of_memory
from unit.search.made_truth import cpu_lattice

from autofit.core.lattice import Config, Lattice
from autofit.core.outcome import Diverged, Fits, Outcome, OutOfMemory, TimedOut
from autofit.core.units import GIB
from autofit.search.lattice_state import LatticeState
from autofit.techniques import Job

LATTICE = cpu_lattice(make_job())
INDICES = st.integers(0, len(LATTICE.configs) - 1)

TIMED_OUT = TimedOut(reason="no end within 600 s", deadline_seconds=600.0)
DIVERGED = Diverged(reason="the loss is not finite", losses=(10.8, None))


def early(gib: float, speed: float) -> Fits:
    """A trial that was stopped after its first repeat."""
    return Fits(measurement=replace(fits(gib, speed).measurement, stopped_early=True))


@settings(max_examples=60, deadline=None)
@given(st.lists(INDICES, min_size=1, max_size=8, unique=True))
def test_running_out_rules_out_exactly_what_is_above(indices: list[int]) -> None:
    state = LatticeState(LATTICE, 10 * GIB)
    for index in indices:
        config = LATTICE.configs[index]
        before = set(state.open)
        state.learn(make_trial(config, out_of_memory(), limit=10 * GIB))
        fewer = before - set(state.open) - {config}
        assert fewer == set(LATTICE.above(config)) & before
    measured = {LATTICE.configs[i] for i in indices}
    assert not measured & set(state.ruled_out)
    # Every config is in exactly one state, and what ran is not called ruled out.
    assert set(state.trials) == measured
    unmeasured = set(state.ruled_out) - measured
    assert set(state.open) | unmeasured | measured == set(LATTICE.configs)
    assert len(state.open) + len(unmeasured) + len(measured) == len(LATTICE.configs)


@settings(max_examples=60, deadline=None)
@given(INDICES, st.sampled_from(["fits", "crashed", "timed_out", "diverged"]))
def test_other_outcomes_rule_out_nothing(index: int, kind: str) -> None:
    outcome = {"fits": fits(4, 100), "crashed": crashed(), "timed_out": TIMED_OUT, "diverged": DIVERGED}[kind]
    state = LatticeState(LATTICE, 10 * GIB)
    state.learn(make_trial(LATTICE.configs[index], outcome, limit=10 * GIB))
    assert len(state.open) == len(LATTICE.configs) - 1
    assert len(state.points()) == (kind == "fits")


def test_a_repeat_without_the_time_to_end_leaves_what_has_fitted() -> None:
    state, config = LatticeState(LATTICE, 10 * GIB), LATTICE.configs[0]
    state.learn(make_trial(config, fits(4, 100), limit=10 * GIB))
    state.learn(make_trial(config, TimedOut(reason="no end within 36 s", deadline_seconds=36.0), limit=10 * GIB))
    assert [point.config for point in state.points()] == [config]


def test_fitting_elsewhere_above_the_limit_is_not_fitting_here(lattice: Lattice) -> None:
    state = LatticeState(lattice, 10 * GIB)
    config = lattice.configs[0]
    state.learn(make_trial(config, fits(12, 100, allocated=11), limit=80 * GIB))
    assert set(state.ruled_out) == set(lattice.above(config))
    assert state.points() == []
    assert state.out_of_memory == 1


def test_what_ran_stays_known_whatever_its_relatives_do() -> None:
    """Two trials may contradict the order: fragmentation, a neighbour on the device. What fitted has been seen."""
    light = LATTICE.configs[0]
    heavy = LATTICE.above(light)[0]
    for order in ((light, heavy), (heavy, light)):
        state = LatticeState(LATTICE, 10 * GIB)
        outcomes: dict[object, Outcome] = {light: out_of_memory(), heavy: fits(4, 100)}
        for config in order:
            state.learn(make_trial(config, outcomes[config], limit=10 * GIB))
        assert [p.config for p in state.points()] == [heavy]


def contradicting() -> tuple[Config, Config, Config]:
    """Three configs, each needing at least the memory of the one before it."""
    for light in LATTICE.configs:
        for middle in LATTICE.above(light):
            for heavy in LATTICE.above(middle):
                return light, middle, heavy
    raise AssertionError("the lattice has no chain of three")


def test_a_fit_above_what_ran_out_reopens_what_that_ruled_out() -> None:
    light, middle, heavy = contradicting()
    state = LatticeState(LATTICE, 10 * GIB)
    for config in (light, heavy):
        state.take(config)
    state.learn(make_trial(light, out_of_memory(), limit=10 * GIB))
    assert middle in state.ruled_out
    state.learn(make_trial(heavy, fits(4, 100), limit=10 * GIB))
    assert state.ruled_out == {}
    assert set(state.open) == set(LATTICE.configs) - {light, heavy}


def test_what_another_trial_rules_out_too_stays_ruled_out() -> None:
    light, middle, heavy = contradicting()
    state = LatticeState(LATTICE, 10 * GIB)
    sound = [
        c for c in LATTICE.configs if c not in (light, middle, heavy) and not LATTICE.is_lighter_or_equal(c, middle)
    ]
    other = next(c for c in sound if set(LATTICE.above(c)) & set(LATTICE.above(light)))
    for config in (light, middle, other):
        state.take(config)
    state.learn(make_trial(light, out_of_memory(), limit=10 * GIB))
    state.learn(make_trial(other, out_of_memory(), limit=10 * GIB))
    state.learn(make_trial(middle, fits(4, 100), limit=10 * GIB))
    assert set(state.ruled_out) == set(LATTICE.above(other)) - {light, middle, other}
    assert all(str(other) in reason for reason in state.ruled_out.values())


def test_what_ran_out_below_a_fit_rules_out_nothing() -> None:
    light, middle, _ = contradicting()
    state = LatticeState(LATTICE, 10 * GIB)
    state.learn(make_trial(middle, fits(4, 100), limit=10 * GIB))
    state.learn(make_trial(light, out_of_memory(), limit=10 * GIB))
    assert state.ruled_out == {}


def test_what_fits_when_it_is_run_again_rules_out_no_longer_once_it_has_fitted_twice() -> None:
    light, *_ = contradicting()
    state = LatticeState(LATTICE, 10 * GIB)
    state.learn(make_trial(light, out_of_memory(), limit=10 * GIB))
    state.learn(make_trial(light, fits(4, 100), limit=10 * GIB))
    assert state.ruled_out and not state.points() and state.contradictory == 1
    state.learn(make_trial(light, fits(4, 90), limit=10 * GIB))
    assert state.ruled_out == {} and state.contradictory == 0
    assert [(p.config, p.measurement.tokens_per_second) for p in state.points()] == [(light, 90.0)]


def test_a_stored_contradiction_is_settled_by_the_trials_that_follow() -> None:
    state = LatticeState(LATTICE, 10 * GIB)
    config = LATTICE.configs[0]
    failed, fitted = (make_trial(config, o, limit=10 * GIB) for o in (out_of_memory(), fits(4, 100)))
    state.recall(failed, [failed, fitted])
    assert state.contradictory == 1 and not state.points()
    state.learn(make_trial(config, fits(4, 90), limit=10 * GIB))
    assert state.contradictory == 0 and [p.verified for p in state.points()] == [True]


def test_a_winner_that_runs_out_of_memory_the_second_time_is_no_winner() -> None:
    state = LatticeState(LATTICE, 10 * GIB)
    config = LATTICE.configs[0]
    state.learn(make_trial(config, fits(4, 100), limit=10 * GIB))
    state.learn(make_trial(config, out_of_memory(), limit=10 * GIB))
    assert state.contradictory == 1 and not state.points()
    state.learn(make_trial(config, fits(4, 100), limit=10 * GIB))
    assert not state.points()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(INDICES, st.sampled_from(["fits", "oom"])), min_size=1, max_size=10))
def test_rulings_are_those_of_the_trials_that_nothing_contradicts(history: list[tuple[int, str]]) -> None:
    state = LatticeState(LATTICE, 10 * GIB)
    seen: dict[Config, str] = {}
    fitted_since: dict[Config, int] = {}
    for index, kind in history:
        config = LATTICE.configs[index]
        state.learn(make_trial(config, fits(4, 100) if kind == "fits" else out_of_memory(), limit=10 * GIB))
        if kind == "oom":
            seen[config], fitted_since[config] = kind, 0
        elif config in fitted_since:
            fitted_since[config] += 1
            seen[config] = "fits" if fitted_since[config] >= 2 else "oom"
        else:
            seen[config] = kind
        fitting = [c for c, k in seen.items() if k == "fits"]
        assert not set(state.ruled_out) & set(seen)
        for c in state.ruled_out:
            below = [r for r, k in seen.items() if k == "oom" and LATTICE.is_lighter_or_equal(r, c)]
            assert any(not any(LATTICE.is_lighter_or_equal(r, f) for f in fitting) for r in below)
        assert set(state.open) | set(state.ruled_out) | set(seen) == set(LATTICE.configs)
        ran_out = [c for c, k in seen.items() if k == "oom"]
        sound = [f for f in fitting if not any(LATTICE.is_lighter_or_equal(r, f) for r in ran_out)]
        below = {c for f in sound for c in LATTICE.below(f)}
        assert {c for c in LATTICE.configs if state.is_below_a_fit(c)} == below


def test_below_is_the_converse_of_above() -> None:
    for config in LATTICE.configs[::7]:
        assert all(config in LATTICE.above(c) for c in LATTICE.below(config))
        assert all(config in LATTICE.below(c) for c in LATTICE.above(config))


def test_what_the_host_lacked_contradicts_no_fit_above_it() -> None:
    light, middle, heavy = contradicting()
    state = LatticeState(LATTICE, 10 * GIB)
    state.learn(make_trial(heavy, fits(4, 100), limit=10 * GIB))
    state.learn(make_trial(light, HOST, limit=10 * GIB))
    assert state.is_below_a_fit(middle)


KILLED = OutOfMemory(reason="killed, as the kernel does", signal="SIGKILL")
HOST = OutOfMemory(reason="cannot allocate memory", host=True)


@pytest.mark.parametrize("outcome", [KILLED, HOST])
def test_what_the_host_lacked_closes_its_own_config_only(outcome: OutOfMemory, lattice: Lattice, job: Job) -> None:
    state = LatticeState(LATTICE, 10 * GIB)
    light, middle, _ = contradicting()
    state.learn(make_trial(light, outcome, limit=10 * GIB))
    assert middle in state.open and light not in state.open
    # Where the host is the device, its memory is what the order is of.
    on_cpu = LatticeState(lattice, 10 * GIB)
    below = next(c for c in lattice.configs if lattice.above(c))
    on_cpu.learn(make_trial(below, outcome, job=job, limit=10 * GIB))
    assert set(on_cpu.ruled_out) == set(lattice.above(below))


def test_runs_count_what_was_timed_in_full() -> None:
    state = LatticeState(LATTICE, 10 * GIB)
    config = LATTICE.configs[0]
    outcomes = fits(4, 100), early(4, 80), crashed()
    attempts = [make_trial(config, outcome, limit=10 * GIB) for outcome in outcomes]
    state.recall(attempts[0], attempts)
    assert [p.runs for p in state.points()] == [1]
    assert not state.points()[0].verified
    state.learn(make_trial(config, fits(4, 101), limit=10 * GIB))
    assert state.points()[0].verified


def test_what_was_stopped_early_is_open_again_once_what_beat_it_has_failed() -> None:
    state = LatticeState(LATTICE, 10 * GIB)
    slow, fast, *_ = (c for c in LATTICE.configs if c["method"] == "full")
    state.learn(make_trial(fast, fits(2, 300), limit=10 * GIB))
    state.learn(make_trial(slow, early(4, 80), limit=10 * GIB))
    assert slow not in state.open
    state.learn(make_trial(fast, fits(2, 290), limit=10 * GIB))
    assert slow not in state.open
    state.learn(make_trial(fast, crashed(), limit=10 * GIB))
    assert slow in state.open and slow not in state.trials


def test_what_is_under_way_is_not_open_and_not_ruled_out() -> None:
    state = LatticeState(LATTICE, 10 * GIB)
    light = LATTICE.configs[0]
    heavy = LATTICE.above(light)[0]
    state.take(heavy)
    assert heavy not in state.open
    state.learn(make_trial(light, out_of_memory(), limit=10 * GIB))
    assert heavy not in state.ruled_out
    assert not state.rule_out({heavy: "any reason"})


def test_trials_of_other_configs_are_no_points_of_this_lattice() -> None:
    """A stored trial of another space may be told; it is nothing that this search would recommend."""
    state = LatticeState(LATTICE, 10 * GIB)
    foreign = make_trial({"method": "full", "attention": "eager"}, fits(4, 100), limit=10 * GIB)
    assert foreign.config not in LATTICE.configs
    state.learn(foreign)
    assert state.points() == []


def test_fits_is_a_fact_of_the_trial_not_of_its_limit() -> None:
    state = LatticeState(LATTICE, 10 * GIB)
    trial = make_trial(LATTICE.configs[0], fits(4, 100), limit=80 * GIB)
    assert isinstance(trial.outcome, Fits)
    assert not state.does_not_fit(trial)
