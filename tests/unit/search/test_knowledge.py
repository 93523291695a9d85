"""What trials say about configs: which stored trial answers under a limit, and what a failure rules out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.operations.made_trials import crashed, fits, make_job, make_trial, out_of_memory
from unit.search.made_truth import cpu_lattice

from autofit.lattice import Lattice
from autofit.outcome import Diverged, Fits, Outcome, TimedOut, Trial
from autofit.search.knowledge import Knowledge, verdict
from autofit.units import GIB

CONFIG: dict[str, object] = {"method": "full", "micro_batch": 1}
LATTICE = cpu_lattice(make_job())
INDICES = st.integers(0, len(LATTICE.configs) - 1)

TIMED_OUT = TimedOut(reason="no end within 600 s", deadline_seconds=600.0)
DIVERGED = Diverged(reason="the loss is not finite", losses=(10.8, None))


def at(limit: float, outcome: Outcome) -> Trial:
    """A trial under a limit in GiB."""
    return make_trial(CONFIG, outcome, limit=int(limit * GIB))


@pytest.mark.parametrize(
    ("ran_under", "outcome", "asked", "answers"),
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
        (10, DIVERGED, 10, True),
        (10, DIVERGED, 11, False),
    ],
)
def test_one_trial(ran_under: float, outcome: Outcome, asked: float, answers: bool) -> None:
    trial = at(ran_under, outcome)
    assert verdict([trial], int(asked * GIB)) == (trial if answers else None)


def test_nothing_known() -> None:
    assert verdict([], GIB) is None


def test_the_latest_attempt_counts() -> None:
    first, second = at(10, fits(4, 100)), at(10, fits(4, 90))
    assert verdict([first, second], 10 * GIB) == second
    failed = at(10, out_of_memory())
    assert verdict([first, failed], 10 * GIB) == failed
    assert verdict([failed, first], 10 * GIB) == first


def test_an_attempt_that_says_nothing_leaves_the_word_to_earlier_ones() -> None:
    fitted, failed = at(10, fits(4, 100)), at(3, out_of_memory())
    assert verdict([fitted, failed], 10 * GIB) == fitted
    assert verdict([failed, at(10, fits(4, 100, allocated=2))], 3 * GIB) == failed
    assert verdict([fitted, at(20, crashed())], 10 * GIB) == fitted


@given(
    st.lists(st.tuples(st.sampled_from(["fits", "oom"]), st.integers(1, 20)), max_size=6),
    st.integers(1, 20),
)
def test_a_verdict_is_of_the_latest_trial_that_speaks_of_the_limit(runs: list[tuple[str, int]], asked: int) -> None:
    trials = [at(gib, out_of_memory()) if kind == "oom" else at(40, fits(gib, 100)) for kind, gib in runs]
    found = verdict(trials, asked * GIB)
    speaks = [t for t, (kind, gib) in zip(trials, runs, strict=True) if (kind == "fits" and (
        gib <= asked or 0.9 * gib > asked)) or (kind == "oom" and gib >= asked)]  # fmt: skip
    assert found == (speaks[-1] if speaks else None)


def test_at_first_everything_is_open() -> None:
    knowledge = Knowledge(LATTICE, 10 * GIB)
    assert knowledge.open == LATTICE.configs
    assert (knowledge.points(), knowledge.out_of_memory, knowledge.ruled_out) == ([], 0, {})


@settings(max_examples=60, deadline=None)
@given(st.lists(INDICES, min_size=1, max_size=8, unique=True))
def test_running_out_rules_out_exactly_what_is_above(indices: list[int]) -> None:
    knowledge = Knowledge(LATTICE, 10 * GIB)
    gone = 0
    for index in indices:
        config = LATTICE.configs[index]
        before = set(knowledge.open)
        told = knowledge.learn(make_trial(config, out_of_memory(), limit=10 * GIB))
        fewer = before - set(knowledge.open) - {config}
        assert fewer == set(LATTICE.above(config)) & before
        assert told == len(fewer)
        gone += told
    measured = {LATTICE.configs[i] for i in indices}
    assert not measured & set(knowledge.ruled_out)
    assert gone - len(measured) <= len(knowledge.ruled_out) <= gone
    # Every config is in exactly one state, and what ran is not called ruled out.
    assert set(knowledge.trials) == measured
    unmeasured = set(knowledge.ruled_out) - measured
    assert set(knowledge.open) | unmeasured | measured == set(LATTICE.configs)
    assert len(knowledge.open) + len(unmeasured) + len(measured) == len(LATTICE.configs)


@settings(max_examples=60, deadline=None)
@given(INDICES, st.sampled_from(["fits", "crashed", "timed_out", "diverged"]))
def test_other_outcomes_rule_out_nothing(index: int, kind: str) -> None:
    outcome = {"fits": fits(4, 100), "crashed": crashed(), "timed_out": TIMED_OUT, "diverged": DIVERGED}[kind]
    knowledge = Knowledge(LATTICE, 10 * GIB)
    assert knowledge.learn(make_trial(LATTICE.configs[index], outcome, limit=10 * GIB)) == 0
    assert len(knowledge.open) == len(LATTICE.configs) - 1
    assert len(knowledge.points()) == (kind == "fits")


def test_fitting_elsewhere_above_the_limit_is_not_fitting_here(lattice: Lattice) -> None:
    knowledge = Knowledge(lattice, 10 * GIB)
    config = lattice.configs[0]
    ruled_out = knowledge.learn(make_trial(config, fits(12, 100, allocated=11), limit=80 * GIB))
    assert ruled_out == len(lattice.above(config))
    assert knowledge.points() == []
    assert knowledge.out_of_memory == 1


def test_what_ran_stays_known_whatever_its_relatives_do() -> None:
    """Two trials may contradict the order: fragmentation, a neighbour on the device. What fitted has been seen."""
    light = LATTICE.configs[0]
    heavy = LATTICE.above(light)[0]
    for order in ((light, heavy), (heavy, light)):
        knowledge = Knowledge(LATTICE, 10 * GIB)
        outcomes: dict[object, Outcome] = {light: out_of_memory(), heavy: fits(4, 100)}
        for config in order:
            knowledge.learn(make_trial(config, outcomes[config], limit=10 * GIB))
        assert [p.config for p in knowledge.points()] == [heavy]


def test_a_later_trial_of_a_config_replaces_the_earlier() -> None:
    knowledge = Knowledge(LATTICE, 10 * GIB)
    config = LATTICE.configs[0]
    knowledge.learn(make_trial(config, fits(4, 100), limit=10 * GIB))
    knowledge.learn(make_trial(config, fits(4, 80), limit=10 * GIB))
    assert [p.measurement.tokens_per_second for p in knowledge.points()] == [80.0]


def test_what_is_under_way_is_not_open_and_not_ruled_out() -> None:
    knowledge = Knowledge(LATTICE, 10 * GIB)
    light = LATTICE.configs[0]
    heavy = LATTICE.above(light)[0]
    knowledge.take(heavy)
    assert heavy not in knowledge.open
    knowledge.learn(make_trial(light, out_of_memory(), limit=10 * GIB))
    assert heavy not in knowledge.ruled_out
    assert not knowledge.rule_out(heavy, "any reason")


def test_trials_of_other_configs_are_no_points_of_this_lattice() -> None:
    """A stored trial of another space may be told; it is nothing that this search would recommend."""
    knowledge = Knowledge(LATTICE, 10 * GIB)
    foreign = make_trial({"method": "full", "attention": "eager"}, fits(4, 100), limit=10 * GIB)
    assert foreign.config not in LATTICE.configs
    knowledge.learn(foreign)
    assert knowledge.points() == []


def test_reasons_name_what_ran_out() -> None:
    knowledge = Knowledge(LATTICE, 10 * GIB)
    config = LATTICE.configs[0]
    knowledge.learn(make_trial(config, out_of_memory(), limit=10 * GIB))
    assert knowledge.ruled_out
    assert all(str(config) in reason for reason in knowledge.ruled_out.values())


def test_fits_is_a_fact_of_the_trial_not_of_its_limit() -> None:
    knowledge = Knowledge(LATTICE, 10 * GIB)
    trial = make_trial(LATTICE.configs[0], fits(4, 100), limit=80 * GIB)
    assert isinstance(trial.outcome, Fits)
    assert not knowledge.does_not_fit(trial)
