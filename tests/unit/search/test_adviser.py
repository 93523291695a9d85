"""The adviser and its Optuna study: what is suggested, and what the study is told."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState
from unit.operations.made_trials import crashed, fits, make_job, make_trial, out_of_memory
from unit.search.made_truth import Truth, cpu_lattice, plan_of, predicted, with_spread

from autofit.catalog.models import shape
from autofit.core.lattice import Config, Lattice
from autofit.core.normal import mean_above
from autofit.core.outcome import Fits, Outcome, TimedOut, Trial
from autofit.core.repeatability import INTERVAL_DEVIATIONS
from autofit.core.units import GIB
from autofit.core.workload import Goal
from autofit.planning.plan import Limits, Plan
from autofit.planning.requests import USUAL_SECONDS
from autofit.prediction.predictions import Predictions
from autofit.search.acquisition import belief
from autofit.search.acquisition.acquisition import (
    LARGE_GAIN,
    LIKELY_FIT,
    OTHER_METHOD_WEIGHT,
    WORTHWHILE_GAIN,
    Acquisition,
)
from autofit.search.acquisition.adviser import OVER_LIMIT, Adviser
from autofit.search.acquisition.gains import Front, _area, _steps
from autofit.search.acquisition.sampler import ABSENT, LatticeSampler, parameters, suggested
from autofit.search.budget import ALLOWANCE_FACTOR, ALLOWANCE_SHARE
from autofit.search.lattice_state import LatticeState
from autofit.techniques import AXES, Job, complete, only_slower

LATTICE = cpu_lattice(make_job())
LIMIT = 10 * GIB


def floors(lattice: Lattice) -> dict[Config, int]:
    return {config: GIB if config["method"] == "full" else GIB // 2 for config in lattice.configs}


FLOORS = floors(LATTICE)


def acquisition_of(state: LatticeState, **changes: Any) -> Acquisition:
    """That of a search in `LATTICE`; `changes` are of its plan."""
    return Acquisition(plan_of(state, **{"lower_bounds": FLOORS, **changes}), state)


def full_only(state: LatticeState, truth: Truth) -> Acquisition:
    """That of a search for full training in a world."""
    return acquisition_of(state, lower_bounds=truth.lower_bounds, goal=Goal(method="full"))


def make_adviser(lattice: Lattice = LATTICE, limit: int = LIMIT) -> tuple[Adviser, LatticeState]:
    state = LatticeState(lattice, limit)
    return Adviser(state, Acquisition(plan_of(state, lower_bounds=floors(lattice)), state)), state


def run(adviser: Adviser, outcome: Outcome) -> Config:
    config = adviser.ask()
    adviser.tell(make_trial(config, outcome, limit=LIMIT))
    return config


def study_of(sampler: LatticeSampler, **options: Any) -> optuna.Study:
    """A study of the user's own, with the two objectives of a search."""
    return optuna.create_study(directions=["minimize", "maximize"], sampler=sampler, **options)


def values_of(truth: Truth, config: Config, limit: int) -> tuple[float, float]:
    """What an objective returns for a config: its memory and its speed."""
    if truth.memory(config) > limit:
        return math.inf, 0.0
    return float(truth.memory(config)), truth.job.workload.tokens_per_step / truth.seconds(config)


@pytest.mark.parametrize(
    ("outcome", "state", "values", "over_limit"),
    [
        (fits(4, 250), TrialState.COMPLETE, [4 * GIB, 250.0], 4 * GIB - LIMIT),
        (out_of_memory(), TrialState.COMPLETE, [2.0 * LIMIT, 0.0], LIMIT),
        (crashed(), TrialState.FAIL, None, None),
    ],
    ids=lambda part: getattr(part, "kind", None),
)
def test_what_the_study_is_told_of_a_trial(
    outcome: Outcome, state: TrialState, values: list[float] | None, over_limit: float | None
) -> None:
    """Memory and speed of what fits; of what ran out, finite values that are infeasible; of a crash nothing."""
    adviser, _ = make_adviser()
    config = run(adviser, outcome)
    (trial,) = adviser.study.trials
    assert suggested(trial.params) == config
    assert (trial.state, trial.values) == (state, values)
    assert trial.constraints.get(OVER_LIMIT) == over_limit
    assert adviser.study.best_trials == ([trial] if isinstance(outcome, Fits) else [])


def test_the_studys_best_trials_are_the_frontier() -> None:
    adviser, state = make_adviser()
    for gib, speed in ((4, 250), (5, 200), (3, 100), (9, 400)):
        run(adviser, fits(gib, speed))
    run(adviser, out_of_memory())
    assert sorted(t.values[1] for t in adviser.study.best_trials) == [100.0, 250.0, 400.0]
    assert len(state.points()) == 4


def test_the_store_is_told_as_if_just_run() -> None:
    original, _ = make_adviser()
    outcomes = [fits(4, 250), out_of_memory(), fits(3, 100)]
    configs = [run(original, outcome) for outcome in outcomes]
    rebuilt, state = make_adviser()
    for config, outcome in zip(configs, outcomes, strict=True):
        rebuilt.tell(make_trial(config, outcome, limit=LIMIT))
    for one, other in zip(original.study.trials, rebuilt.study.trials, strict=True):
        assert (one.params, one.values, one.constraints) == (other.params, other.values, other.constraints)
    assert rebuilt.acquisition.best() == original.acquisition.best()
    assert len(state.trials) == 3


@pytest.mark.parametrize(
    "outcome",
    [fits(4, 250), out_of_memory(), TimedOut(reason="slow", deadline_seconds=60.0, least_step_seconds=20.0)],
    ids=lambda outcome: outcome.kind,
)
def test_a_config_of_another_space_disturbs_neither_the_study_nor_the_advice(outcome: Outcome) -> None:
    """A store may know configs with values that this lattice has not."""
    adviser, _ = make_adviser()
    before = {c.config: c.expected_seconds for c in adviser.acquisition.candidates()}
    adviser.tell(make_trial({"method": "full", "attention": "eager"}, outcome, limit=LIMIT))
    assert adviser.study.trials == []
    assert {c.config: c.expected_seconds for c in adviser.acquisition.candidates()} == before


@pytest.mark.parametrize(("gib", "early", "bounds"), [(5.0, False, True), (9.9, False, False), (5.0, True, False)])
def test_what_only_adds_work_to_what_fits_with_room_is_not_tried_for_its_speed(
    gib: float, early: bool, bounds: bool
) -> None:
    """Even where it is predicted to be twice as fast: it can only save memory. A trial that was stopped early is too
    uncertain to say so."""
    by_config = {
        c: predicted(GIB, 1.0) if c["checkpointing"] == "none" else predicted(2 * GIB, 0.5) for c in LATTICE.configs
    }
    adviser, state = make_adviser()
    adviser.acquisition.use(Predictions(by_config=by_config))
    plain = next(c for c in LATTICE.configs if c["checkpointing"] == "none" and c["method"] == "full")
    measured = replace(fits(gib, 250).measurement, stopped_early=early)
    adviser.tell(make_trial(plain, Fits(measurement=measured), limit=LIMIT))
    slower = only_slower(plain)
    gains_of_slower = {c.config: c.expected_gain for c in adviser.acquisition.candidates() if c.config in slower}
    other = {c.config: c.expected_gain for c in adviser.acquisition.candidates() if c.config["checkpointing"] == "full"}
    assert len(gains_of_slower) > 2 and max(other.values()) > 0.5
    assert all((gain < 0.5) is bounds for gain in gains_of_slower.values())
    (winner,) = state.points()
    state.rule_out(dict.fromkeys(set(state.open) - set(gains_of_slower), "only those are to be judged"))
    # The winner itself may have been unlucky by two deviations of its timing, of which 3 % are 1.645.
    unlucky = 1.0 - math.exp(-2.0 * 0.03 / 1.645)
    assert 0.0 < unlucky < 0.04
    assert (adviser.acquisition.belief.regret_bound(winner) <= unlucky) is bounds


def test_what_was_cut_off_is_open_again() -> None:
    """It may still be the best, which the regret bound has to count."""
    adviser, state = make_adviser()
    run(adviser, fits(4, 250))
    (winner,) = state.points()
    last = next(c for c in state.open if c["method"] == winner.method)
    state.rule_out(dict.fromkeys(set(state.open) - {last}, "only this one may still be the best"))
    config = adviser.ask()
    assert adviser.acquisition.belief.regret_bound(winner) == 0.0
    adviser.give_up(config)
    assert state.open == (config,) and not state.under_way
    assert adviser.acquisition.belief.regret_bound(winner) > 0.1
    assert adviser.study.trials[-1].state == TrialState.FAIL


def job_at(peak_flops: float | None) -> Job:
    """A job on a device of this peak."""
    return replace(make_job(), hardware=replace(make_job().hardware, peak_flops=peak_flops))


def test_nothing_is_faster_than_the_devices_arithmetic() -> None:
    """The bound grants an untried config no more than its FLOPs at the device's peak."""
    bounds, full = {}, next(c for c in LATTICE.configs if c["method"] == "full")
    flops = 6.0 * shape(make_job().model).active_matmul_parameters  # of a token
    for share in (0.0, 0.5, 0.8):
        state = LatticeState(LATTICE, LIMIT)
        acquisition = acquisition_of(state, job=job_at(flops * 250 / share if share else None))
        adviser = Adviser(state, acquisition)
        adviser.tell(make_trial(full, fits(4, 250), limit=LIMIT))
        (winner,) = state.points()
        bounds[share] = acquisition.belief.regret_bound(winner)
    assert bounds[0.0] > 0.5, "one trial tells little of the others"
    assert bounds[0.5] == pytest.approx(0.5, abs=1e-6)
    assert bounds[0.8] == pytest.approx(0.2, abs=1e-6)


@pytest.mark.parametrize("peak", [None, 1e12])
def test_the_devices_arithmetic_is_that_of_its_data_sheet(peak: float | None) -> None:
    """6 FLOPs for each weight and token of full training and 4 of adapters; attention is left out."""
    job = job_at(peak)
    plan = Plan(job=job, lattice=LATTICE, lower_bounds=FLOORS, goal=Goal(), limits=Limits(memory_bytes=LIMIT))
    floor = dict(zip(LATTICE.configs, np.exp(Acquisition(plan, LatticeState.of(plan)).belief._floor), strict=True))
    for config, seconds in floor.items():
        of_weight = 6.0 if config["method"] == "full" else 4.0
        flops = of_weight * shape(job.model).active_matmul_parameters * job.workload.tokens_per_step
        assert seconds == pytest.approx(0.0 if peak is None else flops / peak)


def test_a_second_figure_of_a_config_is_one_more_trial() -> None:
    adviser, state = make_adviser()
    config = run(adviser, fits(4, 250))
    adviser.tell(make_trial(config, fits(4, 240), limit=LIMIT))
    assert [t.values[1] for t in adviser.study.trials] == [250.0, 240.0]
    assert state.points()[0].measurement.tokens_per_second == 240.0


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
@example(history=["fits", "out_of_memory", "fits", "fits", "fits", "out_of_memory", "fits", "wait"], seed=148)
def test_suggestions_are_always_open(history: list[str], seed: int) -> None:
    """Whatever happens, with trials ending late and in any order: never a repeat, never ruled out, never invalid."""
    adviser, state = make_adviser()
    choose = random.Random(seed)
    seen: set[Config] = set()
    under_way: list[Config] = []
    for event in history:
        if event == "wait" or not under_way:
            candidate = adviser.acquisition.best()
            if candidate is None:
                assert list(adviser.acquisition.worthwhile()) == []  # what is open, if anything, is not worth a trial
                break
            assert candidate.config in state.open
            config = adviser.ask()
            assert config in LATTICE.configs and config not in seen and config not in state.ruled_out
            assert suggested(adviser.study.trials[-1].params) == config
            seen.add(config)
            under_way.append(config)
        else:
            config = under_way.pop(choose.randrange(len(under_way)))
            adviser.tell(make_trial(config, outcome_of(event, choose), limit=LIMIT))


def test_configs_without_an_axis_have_a_category_for_it() -> None:
    state = LatticeState(LATTICE, LIMIT)
    sampler = LatticeSampler(state, acquisition_of(state))
    full = next(c for c in LATTICE.configs if c["method"] == "full")
    assert parameters(full, sampler.space)["rank"] == ABSENT
    for config in LATTICE.configs:
        for name, value in parameters(config, sampler.space).items():
            assert sampler.space[name]._contains(sampler.space[name].to_internal_repr(value))


def test_the_sampler_works_in_any_study() -> None:
    state = LatticeState(LATTICE, LIMIT)
    sampler = LatticeSampler(state, acquisition_of(state))
    study = study_of(sampler)
    expected = make_adviser()[0]
    for speed in (250.0, 100.0, 400.0):
        trial = study.ask(sampler.space)
        config = suggested(trial.params)
        assert config == expected.ask()
        study.tell(trial, [4 * GIB, speed])
        outcome = make_trial(config, fits(4, speed), limit=LIMIT)
        state.learn(outcome)
        expected.tell(outcome)
    # Parameters may also be suggested one by one, as in Optuna's examples.
    trial = study.ask()
    params = {name: trial.suggest_categorical(name, d.choices) for name, d in sampler.space.items()}
    assert suggested(params) == expected.ask()


def test_a_study_that_optimizes_learns_from_its_own_trials() -> None:
    """As any sampler of Optuna does: what the objective returns is all that it is told."""
    truth = Truth(make_job(), LATTICE, seed=1)
    limit = sorted(truth.memory(c) for c in LATTICE.configs)[76]
    state = LatticeState(LATTICE, limit)
    sampler = LatticeSampler(state, full_only(state, truth), truth.job)
    ran: list[Config] = []

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        config = sampler.config(trial)
        ran.append(config)
        if len(ran) == 2:
            raise RuntimeError("the driver is gone")
        return values_of(truth, config, limit)

    study_of(sampler).optimize(objective, n_trials=8, catch=RuntimeError)
    assert len(set(ran)) == len(state.trials) == 8 and not state.under_way
    kinds = [state.trials[config].outcome.kind for config in ran]
    assert kinds[1] == "crashed" and kinds.count("fits") > 5
    best = truth.best(limit, ["full"])
    fitting = [config for config in ran if truth.memory(config) <= limit]
    assert best is not None and min(map(truth.seconds, fitting)) < 1.05 * truth.seconds(best), "it has learnt"


def test_a_study_that_is_continued_goes_on_from_its_trials(tmp_path: Path) -> None:
    """What another process has completed in the same storage is learnt, and not run again."""
    truth = Truth(make_job(), LATTICE, seed=1)
    limit = sorted(truth.memory(c) for c in LATTICE.configs)[60]
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    ran: list[list[Config]] = []

    def process(trials: int) -> LatticeState:
        state = LatticeState(LATTICE, limit)
        sampler = LatticeSampler(state, full_only(state, truth), truth.job)
        ran.append([])

        def objective(trial: optuna.Trial) -> tuple[float, float]:
            ran[-1].append(config := sampler.config(trial))
            return values_of(truth, config, limit)

        study = study_of(sampler, storage=storage, study_name="continued", load_if_exists=True)
        study.optimize(objective, n_trials=trials)
        return state

    before, after = process(4), process(3)
    first, second = ran
    assert len(first) == 4 and len(second) == 3 and not set(first) & set(second)
    assert set(after.trials) == {*first, *second}
    assert [after.trials[c].outcome.kind for c in first] == [before.trials[c].outcome.kind for c in first]


@pytest.mark.parametrize("values", [(4.0 * GIB, math.inf), (4.0 * GIB, -1.0), (-math.inf, 250.0), (-1.0, 250.0)])
def test_figures_that_cannot_be_are_a_failed_trial(values: tuple[float, float]) -> None:
    state = LatticeState(LATTICE, LIMIT)
    sampler = LatticeSampler(state, acquisition_of(state), make_job())
    ran: list[Config] = []

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        ran.append(sampler.config(trial))
        return values if len(ran) == 1 else (4.0 * GIB, 250.0)

    study_of(sampler).optimize(objective, n_trials=2)
    assert [state.trials[config].outcome.kind for config in ran] == ["crashed", "fits"]


def test_a_config_that_the_user_enqueues_is_learnt_too() -> None:
    truth = Truth(make_job(), LATTICE, seed=1)
    state = LatticeState(LATTICE, LIMIT)
    sampler = LatticeSampler(state, full_only(state, truth), truth.job)
    study, enqueued = study_of(sampler), LATTICE.configs[-1]

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        assert sampler.config(trial) == enqueued
        return 4.0 * GIB, 100.0

    study.enqueue_trial(parameters(enqueued, sampler.space))
    study.optimize(objective, n_trials=1)
    assert list(state.trials) == [enqueued] and not state.under_way


def test_a_suggestion_that_the_user_overruled_in_part_is_open_again() -> None:
    truth = Truth(make_job(), LATTICE, seed=1)
    state = LatticeState(LATTICE, LIMIT)
    sampler = LatticeSampler(state, full_only(state, truth), truth.job)
    study = study_of(sampler)
    first = sampler._acquisition.first().config
    other = next(c for c in LATTICE.configs if c["micro_batch"] != first["micro_batch"])
    ran: list[Config] = []

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        ran.append(sampler.config(trial))
        return 4.0 * GIB, 100.0

    study.enqueue_trial({"micro_batch": other["micro_batch"]})
    study.optimize(objective, n_trials=1)
    assert ran == [first.replace(micro_batch=other["micro_batch"])] and first in state.open
    assert not state.under_way and list(state.trials) == [c for c in ran if c in state]


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_study_that_optimizes_stops_when_nothing_is_worth_a_trial(jobs: int) -> None:
    """Each config runs once, whoever asks at the same time, and what is left was not worth its trial when the study
    stopped: what several had under way then may still show that something else is."""
    truth = Truth(make_job(), LATTICE, seed=1)
    state = LatticeState(LATTICE, LIMIT)
    acquisition = full_only(state, truth)
    sampler = LatticeSampler(state, acquisition, truth.job)
    ran: list[Config] = []

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        config = sampler.config(trial)
        ran.append(config)
        return 4.0 * GIB, truth.job.workload.tokens_per_step / truth.seconds(config)

    study_of(sampler).optimize(objective, n_jobs=jobs)
    assert len(ran) == len(set(ran)) < len(LATTICE.configs)
    assert state.open and not state.under_way
    assert jobs > 1 or acquisition.best() is None
    best = truth.best(LIMIT, ["full"])
    assert best is not None
    full = [truth.seconds(config) for config in ran if config["method"] == "full"]
    assert min(full) < 1.1 * truth.seconds(best), "what is left could not gain much"


@pytest.mark.parametrize("directions", [["maximize"], ["maximize", "minimize"], ["minimize", "maximize", "maximize"]])
def test_a_study_of_other_objectives_is_told_which_it_needs(directions: list[str]) -> None:
    state = LatticeState(LATTICE, LIMIT)
    sampler = LatticeSampler(state, acquisition_of(state))
    study = optuna.create_study(directions=directions, sampler=sampler)
    with pytest.raises(ValueError, match=rf"directions are {', '.join(directions)}: .*bytes and tokens per second"):
        study.ask(sampler.space)
    assert not state.under_way


def test_a_study_whose_lattice_is_used_up_says_so() -> None:
    one = Lattice(axes=LATTICE.axes, configs=LATTICE.configs[:1])
    adviser, _ = make_adviser(one)
    assert run(adviser, fits(4, 100)) == one.configs[0]
    assert adviser.acquisition.best() is None
    with pytest.raises(ValueError, match="every config"):
        adviser.ask()


def compiled_or_not() -> Lattice:
    """Every config of the space, and the same compiled."""
    return Lattice(axes=AXES, configs=LATTICE.configs + tuple(c.replace(compile=True) for c in LATTICE.configs))


def with_setup(config: Config, seconds: float) -> Trial:
    """A trial that fits, after a set-up of so many seconds."""
    measurement = replace(fits(4, 250).measurement, setup_seconds=seconds)
    return make_trial(config, Fits(measurement=measurement), limit=LIMIT)


def test_what_takes_long_to_set_up_must_gain_more() -> None:
    def after(seconds: float) -> tuple[float, bool]:
        """Expected seconds of a compiled trial after another took `seconds` to set up, and whether one is next."""
        adviser, _ = make_adviser(compiled_or_not())
        first = adviser.ask()
        assert first["compile"] is False
        adviser.tell(with_setup(first, 5.0))
        candidates = {candidate.config: candidate for candidate in adviser.acquisition.candidates()}
        compiled = candidates[first.replace(compile=True)]
        same = next(c for c in candidates.values() if not c.config["compile"] and c.config["method"] == first["method"])
        assert compiled.expected_seconds > 1.5 * same.expected_seconds
        adviser.tell(with_setup(compiled.config, seconds))
        then = [c.expected_seconds for c in adviser.acquisition.candidates() if c.config["compile"] is True]
        return max(then), adviser.ask()["compile"] is True

    quick, _ = after(5.0)
    slow, is_next = after(500.0)
    assert slow > 3 * quick
    assert not is_next


def test_what_cannot_end_in_time_is_not_suggested() -> None:
    adviser, _ = make_adviser(compiled_or_not())
    adviser.tell(with_setup(adviser.ask(), 5.0))
    for _ in range(5):
        candidate = adviser.acquisition.best(seconds_left=30.0)
        assert candidate is not None and candidate.expected_seconds <= 30.0
        assert adviser.ask(30.0) == candidate.config
    assert adviser.acquisition.best(seconds_left=1.0) is None
    assert adviser.acquisition.best() is not None


def test_where_every_trial_takes_long_the_shorter_ones_go_on() -> None:
    """A step of 512 tokens takes nearly nine minutes: each trial takes most of the usual ten, or more."""
    adviser, _ = make_adviser()
    for _ in range(4):
        run(adviser, fits(4, 1.0))
        best, every = adviser.acquisition.best(), adviser.acquisition.candidates()
        shortest = min(c.expected_seconds for c in every)
        assert shortest > ALLOWANCE_SHARE * USUAL_SECONDS
        assert best is not None and best.expected_seconds <= ALLOWANCE_FACTOR * shortest


def test_a_time_out_says_how_long_its_like_take() -> None:
    adviser, _ = make_adviser(compiled_or_not())
    slow = LATTICE.configs[0].replace(compile=True)
    adviser.tell(make_trial(slow, TimedOut(reason="no end", deadline_seconds=600.0), limit=LIMIT))
    seconds = {c.config["compile"]: c.expected_seconds for c in adviser.acquisition.candidates()}
    assert seconds[True] > 200 > seconds[False]


@pytest.mark.parametrize(
    ("spread", "least"), [(None, WORTHWHILE_GAIN), (0.01, WORTHWHILE_GAIN), (0.16, 0.24 * 0.08), (3.0, 0.024)]
)
def test_a_gain_that_luck_explains_is_not_worth_a_trial(spread: float | None, least: float) -> None:
    adviser, _ = make_adviser()
    assert adviser.acquisition.worthwhile_gain() == 0.0  # until something fits, every trial is worth it
    run(adviser, with_spread(fits(4, 250), spread))
    assert adviser.acquisition.worthwhile_gain() == pytest.approx(least)


@pytest.mark.parametrize("thorough", [False, True])
def test_what_is_likelier_to_run_out_is_left_alone_or_comes_last(thorough: bool) -> None:
    truth = Truth(make_job(), LATTICE, seed=1)
    limit = sorted(truth.memory(c) for c in LATTICE.configs)[len(LATTICE.configs) // 2]
    state = LatticeState(LATTICE, limit)
    adviser = Adviser(state, acquisition_of(state, thorough=thorough))
    unlikely = 0
    while (candidate := adviser.acquisition.best()) is not None:
        if state.points() and candidate.fit_probability < LIKELY_FIT:
            unlikely += 1
            gains = [c.expected_gain for c in adviser.acquisition.candidates() if c.fit_probability >= LIKELY_FIT]
            assert max(gains, default=0.0) <= adviser.acquisition.worthwhile_gain()
        adviser.tell(truth.trial(adviser.ask(), limit))
    assert (unlikely > 0) is thorough


@pytest.mark.parametrize(("more", "tried"), [(0.97, False), (1.03, True)])
def test_what_is_likelier_to_run_out_is_tried_where_it_may_gain_a_tenth(
    more: float, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gain is that of the one open config, whose chance of fitting is 0.3, just below and just above the bound."""
    adviser, state = make_adviser()
    run(adviser, fits(4, 250))
    (kept, *others) = state.open
    state.rule_out(dict.fromkeys(others, "not of this test"))
    weighed = adviser.acquisition._weighed()
    changed = replace(
        weighed, gain=np.array([more * LARGE_GAIN]), probability=np.array([0.3]), cannot_fit=np.array([False])
    )
    monkeypatch.setattr(adviser.acquisition, "_weighed", lambda: changed)
    best = adviser.acquisition.best()
    assert (None if best is None else best.config) == (kept if tried else None)


@pytest.mark.parametrize(
    ("chance", "seconds", "recommended"),
    [(0.09, 1.0, "lora"), (0.11, 1.0, "full"), (1.0, 4.9, "full"), (1.0, 5.1, "lora")],
)
def test_a_method_may_be_recommended_as_long_as_it_would_be_tried_and_is_practical(
    chance: float, seconds: float, recommended: str
) -> None:
    """Its chance of fitting, and how many times the step of a measured LoRA its own is expected to take."""
    adviser, _ = make_adviser()
    arguments = (
        {"lora": Front.of([(1.0, 1.0)])},
        np.array(["full", "lora"]),
        np.array([chance, 1.0]),
        np.array([seconds, 2.0]),
    )
    assert adviser.acquisition._recommended(*arguments) == recommended
    assert acquisition_of(LatticeState(LATTICE, LIMIT), thorough=True)._recommended(*arguments) is None


def test_a_gain_that_other_executions_explain_is_not_worth_a_trial_either() -> None:
    adviser, state = make_adviser()
    run(adviser, with_spread(fits(4, 250), 0.06))
    assert adviser.acquisition.worthwhile_gain() == WORTHWHILE_GAIN
    before = state.version
    state.executions_differ(0.08 / INTERVAL_DEVIATIONS)
    assert adviser.acquisition.worthwhile_gain() == pytest.approx(0.24 * 0.05)
    assert [p.between for p in state.points()] == [0.08 / INTERVAL_DEVIATIONS] and state.version > before


def test_the_area_under_the_frontier_grows_as_integration_says() -> None:
    choose = random.Random(3)
    limit = 10.0 * GIB
    for _ in range(20):
        points = [(choose.uniform(1, 9) * GIB, choose.uniform(0.1, 2.0)) for _ in range(choose.randrange(1, 6))]
        best = min(seconds for _, seconds in points)
        memory = np.array([choose.uniform(0.5, 12) * GIB for _ in range(4)])
        speedup = np.array([[choose.uniform(0.3, 2) for _ in range(4)] for _ in range(3)])
        shares = (np.arange(20000) + 0.5) / 20000
        heights = np.zeros_like(shares)
        for size, seconds in points:
            heights[shares >= size / limit] = np.maximum(heights[shares >= size / limit], best / seconds)
        expected = np.array(
            [
                [
                    np.where(shares >= m / limit, np.maximum(0.0, s - heights), 0.0).mean()
                    for m, s in zip(memory, case, strict=True)
                ]
                for case in speedup
            ]
        )
        assert _area(_steps(Front.of(points), memory, limit), speedup) == pytest.approx(expected, abs=2e-3)


def test_a_frontier_is_what_nothing_beats() -> None:
    front = Front.of([(3.0, 2.0), (1.0, 5.0), (2.0, 5.0), (4.0, 2.5), (5.0, 1.0), (3.0, 4.0)])
    assert front.memory.tolist() == [1.0, 3.0, 5.0] and front.seconds.tolist() == [5.0, 2.0, 1.0]
    assert front.best_seconds == 1.0


def heaviest(lattice: Lattice) -> Config:
    """A config with many below it."""
    return max(lattice.configs, key=lambda config: len(lattice.below(config)))


@pytest.mark.parametrize("is_predicted", [False, True])
def test_what_is_lighter_than_what_has_fitted_fits(is_predicted: bool) -> None:
    """Whatever the regression and the predictions say: here, that nothing fits."""
    adviser, _ = make_adviser(limit=2 * GIB)
    if is_predicted:
        adviser.acquisition.use(Predictions(by_config=dict.fromkeys(LATTICE.configs, predicted(90 * GIB))))
    fitted = heaviest(LATTICE)
    adviser.tell(make_trial(fitted, fits(1.999, 250), limit=2 * GIB))
    below = set(LATTICE.below(fitted))
    sure = {c.config for c in adviser.acquisition.candidates() if c.fit_probability == 1.0}
    assert len(below) > 5 and below <= sure
    assert not below & set(adviser.acquisition.predicted_out())
    others = [c for c in adviser.acquisition.candidates() if c.config not in below]
    assert any(c.fit_probability < LIKELY_FIT for c in others)


def test_what_is_under_way_is_believed_to_show_what_is_expected() -> None:
    """So the same is not asked for again under another name, and a gain counts beside what is already running."""
    alike = Lattice(axes=AXES, configs=LATTICE.configs + tuple(c.replace(attention="eager") for c in LATTICE.configs))
    adviser, _ = make_adviser(alike)
    adviser.tell(make_trial(alike.configs[0], fits(4, 250), limit=LIMIT))
    before = {c.config: c for c in adviser.acquisition.candidates()}
    running = adviser.ask()
    after = {c.config: c for c in adviser.acquisition.candidates()}
    of_method = [c for c in after if c["method"] == running["method"]]
    assert all(after[c].expected_gain < before[c].expected_gain for c in of_method)
    assert all(after[c].fit_probability == before[c].fit_probability for c in of_method), "that it fits is not believed"
    twin = running.replace(attention="sdpa" if running["attention"] == "eager" else "eager")
    left = {c: after[c].expected_gain / before[c].expected_gain for c in of_method}
    assert left[twin] < 0.5 and left[twin] < max(left.values())


METHODS = ("full", "lora", "qlora")


def gains(acquisition: Acquisition) -> dict[Config, float]:
    return {c.config: c.expected_gain for c in acquisition.candidates()}


def alone(state: LatticeState) -> dict[Config, float]:
    """What each config may gain for a user who wants no method but its own."""
    of_method = {name: gains(acquisition_of(state, goal=Goal(method=name))) for name in METHODS}
    return {config: of_method[config.text("method")][config] for config in state.open}


def test_a_gain_counts_less_in_a_method_that_will_not_be_recommended() -> None:
    """Once anything has fitted, all counts of the most faithful method that fits, or may."""
    for gone, recommended in ((), "full"), (("full",), "lora"):
        state = LatticeState(LATTICE, LIMIT)
        too_large = (config for config in LATTICE.configs if config["method"] in gone)
        state.rule_out(dict.fromkeys(too_large, "its weights alone take more"))
        assert gains(acquisition_of(state)) == alone(state)
        one = next(c for c in state.open if c["method"] == "qlora")
        state.learn(make_trial(one, fits(2, 100), limit=LIMIT))
        alike, ours = alone(state), gains(acquisition_of(state))
        for config in state.open:
            worth = 1.0 if config["method"] == recommended else OTHER_METHOD_WEIGHT
            assert 0.0 < ours[config] == pytest.approx(worth * alike[config])


@pytest.mark.parametrize("slow", [1.0, 100.0])
def test_a_method_of_which_nothing_is_measured_is_begun_only_where_it_may_keep_up(slow: float) -> None:
    """Also the one that would be recommended: on a device that emulates bf16, its trials take minutes for nothing."""
    state = LatticeState(LATTICE, LIMIT)
    acquisition = acquisition_of(state)
    by_config = {c: predicted(GIB, slow if c["method"] == "full" else 1.0, error=0.1) for c in LATTICE.configs}
    acquisition.use(Predictions(by_config=by_config))
    one = next(c for c in state.open if c["method"] == "lora")
    state.learn(make_trial(one, fits(1, 512), limit=LIMIT))  # a step of one second, as predicted
    worth = {c.config for c in acquisition.worthwhile()}
    assert any(config["method"] == "full" for config in worth) == (slow == 1.0)


def test_the_frontier_counts_less_than_the_best_speed_unless_it_is_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a config that can only add to the frontier, nothing else is gained."""
    monkeypatch.setattr(belief, "ORDER_DOUBT", 0.0)
    lightest = next(c for c in LATTICE.configs if c["checkpointing"] == "full")
    by_search, goal = [], Goal(method=lightest.text("method"))
    for thorough in (False, True):
        state = LatticeState(LATTICE, LIMIT)
        state.learn(make_trial(lightest.replace(checkpointing="none"), fits(6, 10**9), limit=LIMIT))
        by_search.append(gains(acquisition_of(state, goal=goal, thorough=thorough))[lightest])
    assert by_search[0] * 0.5 == pytest.approx(by_search[1] * 0.2) and by_search[0] > 0


def test_no_method_takes_precedence_in_a_thorough_search() -> None:
    state = LatticeState(LATTICE, LIMIT)
    of_any, of_one = (acquisition_of(state, goal=Goal(method=method), thorough=True) for method in ("any", "qlora"))
    assert gains(of_any) == gains(of_one)


def test_what_is_only_faster_than_its_own_impractical_method_gains_nothing() -> None:
    """Full fine-tuning is recommended from a fifth of LoRA's speed on, and not before."""
    full, *others = (c for c in LATTICE.configs if c["method"] == "full")
    lora = next(c for c in LATTICE.configs if c["method"] == "lora")
    most_gained = []
    for speed in (20, 1000):
        state = LatticeState(LATTICE, LIMIT)
        for config, measured in ((full, 10), (lora, speed)):
            state.learn(make_trial(config, fits(2, measured), limit=LIMIT))
        gained = gains(acquisition_of(state))
        most_gained.append(max(gained[config] for config in others))
    beside_a_slow_one, beside_a_fast_one = most_gained
    assert beside_a_fast_one < 0.2 * beside_a_slow_one


def test_the_method_that_will_be_recommended_comes_first() -> None:
    """By its predicted memory before anything has fitted; the others get the fewer trials, since their gains count
    less."""
    for size, first in ((2 * GIB, "full"), (LIMIT * 2, "lora")):
        by_config = {c: predicted(size if c["method"] == "full" else GIB) for c in LATTICE.configs}
        state = LatticeState(LATTICE, LIMIT)
        acquisition = acquisition_of(state)
        acquisition.use(Predictions(by_config=by_config))
        adviser = Adviser(state, acquisition)
        tried = []
        while adviser.acquisition.best() is not None:
            tried.append(run(adviser, fits(2, 100)).text("method"))
        assert tried[0] == first and {"lora", "qlora"} <= {*tried}
        assert tried.count(first) > max(tried.count(method) for method in METHODS if method != first)


def test_a_config_that_cannot_be_slower_than_the_winner_runs_again_where_its_trial_was_noisy() -> None:
    """Measured 9 % slower than one that does all of its work and checkpoints besides."""
    plain = complete({"micro_batch": 2})
    outcomes = {plain: fits(3, 91), plain.replace(checkpointing="full"): fits(2, 100), complete({}): fits(2.5, 91)}
    for spread, contested in ((0.3, plain), (0.01, None)):
        state = LatticeState(LATTICE, LIMIT)
        for config, outcome in outcomes.items():
            state.learn(make_trial(config, with_spread(outcome, spread), limit=LIMIT))
        (winner,) = [p for p in state.points() if p.config["checkpointing"] == "full"]
        acquisition = acquisition_of(state)
        for runs in (1, 2, 3):
            rival = acquisition.contender(winner)
            assert (None if rival is None else rival.config) == (contested if runs < 3 else None)
            state.learn(state.trials[plain])


def test_where_it_turns_out_not_to_fit_the_next_method_counts() -> None:
    state = LatticeState(LATTICE, LIMIT)
    acquisition = acquisition_of(state)
    one = next(c for c in LATTICE.configs if c["method"] == "qlora")
    state.learn(make_trial(one, fits(2, 100), limit=LIMIT))
    assert acquisition.first().config["method"] == "full"
    for config in [c for c in LATTICE.configs if c["method"] == "full"]:
        if config in state.open:
            state.learn(make_trial(config, out_of_memory(), limit=LIMIT))
    assert acquisition.first().config["method"] == "lora"


def test_running_out_makes_its_like_less_likely_to_fit() -> None:
    """Also before anything has fitted, and also where the lattice's order says nothing."""
    state = LatticeState(LATTICE, LIMIT)
    acquisition = acquisition_of(state, lower_bounds=dict.fromkeys(LATTICE.configs, LIMIT // 2))
    ran_out = max(acquisition.candidates(), key=lambda c: c.fit_probability).config
    before = {c.config: c.fit_probability for c in acquisition.candidates()}
    state.learn(make_trial(ran_out, out_of_memory(), limit=LIMIT))
    after = {c.config: c.fit_probability for c in acquisition.candidates()}
    assert after and all(after[c] <= before[c] for c in after)
    assert sum(after.values()) < 0.9 * sum(before[c] for c in after)


@pytest.mark.parametrize("least", [-9.0, -1.0, 0.0, 2.0, 7.9, 8.1, 30.0])
def test_the_mean_above_a_bound_is_that_of_the_normal_distribution(least: float) -> None:
    grid = np.linspace(max(least, -10.0), max(least, -10.0) + 20.0, 2_000_001)
    weights = np.exp(-(grid**2 - grid[0] ** 2) / 2)
    assert mean_above(5.0 + 2.0 * least, 5.0, 2.0) == pytest.approx(
        5.0 + 2.0 * float((grid * weights).sum() / weights.sum()), rel=1e-3
    )
