"""The adviser and its Optuna study: what is suggested, and what the study is told."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.study import StudyDirection
from optuna.trial import TrialState
from unit.operations.made_trials import crashed, fits, make_job, make_trial, out_of_memory
from unit.search.made_truth import Truth, cpu_lattice

from autofit.lattice import Config, Lattice
from autofit.outcome import Fits, Outcome
from autofit.search.adviser import OVER_LIMIT, Adviser
from autofit.search.knowledge import Knowledge
from autofit.search.sampler import ABSENT, LatticeSampler, parameters
from autofit.units import GIB

LATTICE = cpu_lattice(make_job())
LIMIT = 10 * GIB


def floor(config: Config) -> int:
    return GIB if config["method"] == "full" else GIB // 2


def make_adviser(lattice: Lattice = LATTICE, limit: int = LIMIT) -> tuple[Adviser, Knowledge]:
    knowledge = Knowledge(lattice, limit)
    return Adviser(knowledge, floor), knowledge


def ask(adviser: Adviser) -> Config:
    candidate = adviser.best_candidate()
    assert candidate is not None
    return adviser.ask(candidate)


def run(adviser: Adviser, outcome: Outcome) -> Config:
    config = ask(adviser)
    adviser.tell(make_trial(config, outcome, limit=LIMIT))
    return config


def suggested(trial: optuna.trial.FrozenTrial) -> Config:
    """The config that a trial of the study is of."""
    return Config.of({name: value for name, value in trial.params.items() if value != ABSENT})


def test_the_study_has_two_objectives() -> None:
    adviser, _ = make_adviser()
    assert adviser.study.directions == [StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE]


def test_what_fits_is_told_with_memory_and_speed() -> None:
    adviser, _ = make_adviser()
    config = run(adviser, fits(4, 250))
    (trial,) = adviser.study.trials
    assert suggested(trial) == config
    assert trial.state == TrialState.COMPLETE
    assert trial.values == [4 * GIB, 250.0]
    assert trial.constraints == {OVER_LIMIT: 4.0 * GIB - LIMIT}
    assert adviser.study.best_trials == [trial]


def test_out_of_memory_is_told_as_infeasible_with_finite_values() -> None:
    adviser, _ = make_adviser()
    config = run(adviser, out_of_memory())
    (trial,) = adviser.study.trials
    assert suggested(trial) == config
    assert trial.state == TrialState.COMPLETE
    assert all(math.isfinite(value) for value in trial.values)
    assert trial.values[0] > LIMIT and trial.values[1] == 0.0
    assert trial.constraints[OVER_LIMIT] > 0
    assert adviser.study.best_trials == []


def test_a_crash_is_told_as_a_failure_without_values() -> None:
    adviser, _ = make_adviser()
    run(adviser, crashed())
    (trial,) = adviser.study.trials
    assert (trial.state, trial.values) == (TrialState.FAIL, None)


def test_the_studys_best_trials_are_the_frontier() -> None:
    adviser, knowledge = make_adviser()
    for gib, speed in ((4, 250), (5, 200), (3, 100), (9, 400)):
        run(adviser, fits(gib, speed))
    run(adviser, out_of_memory())
    assert sorted(t.values[1] for t in adviser.study.best_trials) == [100.0, 250.0, 400.0]
    assert len(knowledge.points()) == 4


def test_the_store_is_told_as_if_just_run() -> None:
    asked, _ = make_adviser()
    outcomes = [fits(4, 250), out_of_memory(), fits(3, 100)]
    configs = [run(asked, outcome) for outcome in outcomes]
    rebuilt, knowledge = make_adviser()
    for config, outcome in zip(configs, outcomes, strict=True):
        rebuilt.tell(make_trial(config, outcome, limit=LIMIT))
    for one, other in zip(asked.study.trials, rebuilt.study.trials, strict=True):
        assert (one.params, one.values, one.constraints) == (other.params, other.values, other.constraints)
    assert rebuilt.best_candidate() == asked.best_candidate()
    assert len(knowledge.trials) == 3


def test_a_config_of_another_space_is_not_told_to_the_study() -> None:
    adviser, _ = make_adviser()
    adviser.tell(make_trial({"method": "full", "attention": "eager"}, fits(4, 250), limit=LIMIT))
    assert adviser.study.trials == []


def test_what_is_under_way_is_not_suggested_again() -> None:
    adviser, knowledge = make_adviser()
    under_way = [ask(adviser) for _ in range(5)]
    assert len(set(under_way)) == 5
    assert not set(under_way) & set(knowledge.open)
    assert [t.state for t in adviser.study.trials] == [TrialState.RUNNING] * 5


def test_outcomes_may_come_in_any_order() -> None:
    adviser, _ = make_adviser()
    configs = [ask(adviser) for _ in range(4)]
    for number, config in enumerate(reversed(configs)):
        adviser.tell(make_trial(config, fits(4, 100 + number), limit=LIMIT))
    assert [suggested(t) for t in adviser.study.trials] == configs
    assert [t.values[1] for t in adviser.study.trials] == [103.0, 102.0, 101.0, 100.0]


def test_a_second_figure_of_a_config_is_one_more_trial() -> None:
    adviser, knowledge = make_adviser()
    config = run(adviser, fits(4, 250))
    adviser.tell(make_trial(config, fits(4, 240), limit=LIMIT))
    assert [t.values[1] for t in adviser.study.trials] == [250.0, 240.0]
    assert knowledge.points()[0].measurement.tokens_per_second == 240.0


def outcome_of(kind: str, choose: random.Random) -> Outcome:
    makers: dict[str, Callable[[], Outcome]] = {
        "fits": lambda: fits(choose.uniform(1, 9), choose.uniform(50, 400)),
        "out_of_memory": out_of_memory,
        "crashed": crashed,
    }
    return makers[kind]()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(["fits", "out_of_memory", "crashed", "wait"]), min_size=1, max_size=12),
    st.integers(0, 1000),
)
def test_suggestions_are_always_open(history: list[str], seed: int) -> None:
    """Whatever happens, with trials ending late and in any order: never a repeat, never ruled out, never invalid."""
    adviser, knowledge = make_adviser()
    choose = random.Random(seed)
    seen: set[Config] = set()
    under_way: list[Config] = []
    for event in history:
        if event == "wait" or not under_way:
            candidate = adviser.best_candidate()
            if candidate is None:
                assert knowledge.open == ()
                break
            assert candidate.config in knowledge.open
            config = adviser.ask(candidate)
            assert config in LATTICE.configs and config not in seen and config not in knowledge.ruled_out
            assert suggested(adviser.study.trials[-1]) == config
            seen.add(config)
            under_way.append(config)
        else:
            config = under_way.pop(choose.randrange(len(under_way)))
            adviser.tell(make_trial(config, outcome_of(event, choose), limit=LIMIT))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_a_world_is_walked_to_its_end_without_a_repeat(seed: int) -> None:
    truth = Truth(make_job(), LATTICE, seed)
    limit = sorted(truth.memory(c) for c in LATTICE.configs)[60]
    knowledge = Knowledge(LATTICE, limit)
    adviser = Adviser(knowledge, truth.floor)
    ran: list[Config] = []
    for _ in range(30):
        candidate = adviser.best_candidate()
        if candidate is None:
            break
        assert 0.0 <= candidate.fit_probability <= 1.0
        assert math.isfinite(candidate.expected_gain) and candidate.expected_gain >= 0.0
        config = adviser.ask(candidate)
        trial = truth.trial(config, limit)
        ruled_out_before = set(knowledge.ruled_out)
        adviser.tell(trial)
        assert config not in ran and config not in ruled_out_before
        ran.append(config)
        # Nothing that was ruled out would have fitted.
        assert all(truth.memory(c) > limit for c in knowledge.ruled_out)
        assert isinstance(trial.outcome, Fits) == (truth.memory(config) <= limit)
    assert len(adviser.study.trials) == len(ran)


def test_an_empty_adviser_asks_for_something_that_is_likely_to_fit() -> None:
    adviser, _ = make_adviser(limit=int(1.2 * GIB))
    candidate = adviser.best_candidate()
    assert candidate is not None and candidate.fit_probability > 0


def test_configs_without_an_axis_have_a_category_for_it() -> None:
    sampler = LatticeSampler(Knowledge(LATTICE, LIMIT))
    full = next(c for c in LATTICE.configs if c["method"] == "full")
    assert parameters(full, sampler.space)["rank"] == ABSENT
    for config in LATTICE.configs:
        for name, value in parameters(config, sampler.space).items():
            assert sampler.space[name]._contains(sampler.space[name].to_internal_repr(value))


def test_the_sampler_is_not_asked_without_a_choice() -> None:
    _, knowledge = make_adviser()
    study = optuna.create_study(
        directions=["minimize", "maximize"], sampler=(sampler := LatticeSampler(knowledge)), study_name="alone"
    )
    with pytest.raises(AssertionError, match="ask through Adviser"):
        study.ask(sampler.space)
