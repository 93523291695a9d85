"""Predictions in a search: what cannot fit is never run, and predictions that are wrong cost trials, not the best."""

from __future__ import annotations

import inspect
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from unit.operations.made_trials import OLDER, fits, make_job, make_trial, out_of_memory
from unit.search.made_truth import WITHIN_TIES, Run, Truth, cpu_lattice, plan_of, predicted, prepare
from unit.search.test_loop import check_counts_of_memory, limit_for, searched

from autofit.core.lattice import Config, Lattice
from autofit.core.outcome import OutOfMemory, Trial
from autofit.core.prediction import Prediction
from autofit.core.units import GIB
from autofit.estimate.memory import deviation
from autofit.estimate.memory.deviation import NOTHING_COMPARED, UNKNOWN, MemoryDeviation
from autofit.prediction.memory_deviations import LEAST, learned
from autofit.prediction.predictions import Predictions, Report
from autofit.search.acquisition.acquisition import Acquisition
from autofit.search.acquisition.memory_fit import memory_error, memory_errors
from autofit.search.acquisition.step_times import LEAST_EFFECT, time_error
from autofit.search.acquisition.surrogate import TIME
from autofit.search.lattice_state import LatticeState

SEEDS = range(2)
LATTICE = cpu_lattice(make_job())


def foreseen(
    truth: Truth, error: Callable[[Config], float] = lambda config: 1.0, *, timed: bool = False, deviation: float = 0.05
) -> Predictions:
    """Predictions that are the truth over `error`."""
    by_config = {
        c: predicted(truth.memory(c) / error(c), truth.seconds(c) if timed else None, error=0.1)
        for c in truth.lattice.configs
    }
    return Predictions(
        by_config=by_config, memory_deviation=MemoryDeviation(mean=0.0, deviation=deviation, compared_on=0)
    )


def believing(
    truth: Truth, limit: int, predictions: Predictions, *, floors: bool = True
) -> tuple[Acquisition, LatticeState]:
    """An acquisition with predictions, and what it knows of the lattice; without `floors`, no memory is known."""
    state = LatticeState(truth.lattice, limit)
    plan = plan_of(state, lower_bounds=truth.lower_bounds) if floors else plan_of(state)
    acquisition = Acquisition(plan, state)
    acquisition.use(predictions)
    return acquisition, state


def ran(run: Run) -> set[Config]:
    return {r.config for r in run.pool.submitted}


def test_what_no_host_holds_is_never_run(lattice: Lattice) -> None:
    truth = Truth(make_job(), lattice, 0)
    heavy = {c: GIB for c in truth.lattice.configs if c["checkpointing"] == "none"}
    run = searched(truth, predictions=replace(foreseen(truth, timed=True), beyond_host=heavy))
    assert heavy and not ran(run) & set(heavy)
    reasons = [run.search.state.ruled_out[config] for config in heavy]  # some by the floor, before
    assert any("host memory is predicted to lack" in reason for reason in reasons)
    assert run.progress.best is not None


@pytest.mark.parametrize("shared", [4 * GIB, None])
def test_trials_that_one_host_does_not_hold_together_wait(lattice: Lattice, shared: int | None) -> None:
    truth = Truth(make_job(), lattice, 0)
    takes = {c: 3 * GIB if c["checkpointing"] == "none" else GIB for c in truth.lattice.configs}
    predictions = replace(foreseen(truth, timed=True), host_bytes=takes, shared_host_bytes=shared)
    run = prepare(truth, limit_for(truth, 0.5), size=4, predictions=predictions)
    together: list[int] = []
    run.pool.checks.append(lambda request: together.append(sum(takes[r.config] for r in (*run.pool._running, request))))
    run.search.run()
    assert run.regret < WITHIN_TIES
    assert run.pool.most_at_once > 1
    assert {takes[config] for config in ran(run)} == {GIB, 3 * GIB}, "what must run alone is run all the same"
    assert max(together) <= shared if shared is not None else max(together) > 4 * GIB


def test_right_predictions_find_the_best_and_save_trials(lattice: Lattice) -> None:
    done, saved = 0, 0
    for seed, share in itertools.product(SEEDS, (0.15, 0.5, 0.9)):
        truth = Truth(make_job(), lattice, seed)
        without, run = searched(truth, share), searched(truth, share, predictions=foreseen(truth, timed=True))
        assert run.regret < WITHIN_TIES
        assert run.progress.out_of_memory <= without.progress.out_of_memory
        done, saved = done + run.progress.done, saved + without.progress.done - run.progress.done
    assert done < 0.85 * (done + saved)


def test_several_workers_do_not_run_the_same_under_several_names(lattice: Lattice) -> None:
    """What is asked for takes into account what is under way, so four workers need hardly more trials than one."""
    worlds = [Truth(make_job(), lattice, seed) for seed in range(3)]
    one, four = (
        [searched(truth, 0.5, predictions=foreseen(truth, timed=True), size=size) for truth in worlds]
        for size in (1, 4)
    )
    assert sum(r.progress.done for r in four) < 1.25 * sum(r.progress.done for r in one)
    assert all(run.regret < WITHIN_TIES for run in four)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_cannot_fit_never_runs_and_counts_as_ruled_out(lattice: Lattice, seed: int) -> None:
    truth = Truth(make_job(), lattice, seed)
    limit = limit_for(truth, 0.5)
    run = searched(truth, predictions=foreseen(truth, lambda config: 1.02, deviation=0.02))
    beyond = {c for c in lattice.configs if truth.memory(c) > 1.25 * limit}
    assert beyond and not beyond & ran(run)
    assert run.progress.ruled_out > len(run.search.state.ruled_out)
    assert run.progress.ruled_out + len(run.search.state.trials) <= len(lattice.configs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("deviation", [0.02, UNKNOWN])
def test_predictions_that_are_twice_off_end_at_the_best(
    lattice: Lattice, seed: int, factor: float, deviation: float
) -> None:
    """Whether nothing is known of the error, or predictions were within 2 % in a hundred earlier trials."""
    truth = Truth(make_job(), lattice, seed)
    run = searched(truth, predictions=foreseen(truth, lambda config: factor, deviation=deviation))
    assert run.regret < WITHIN_TIES
    assert run.progress.done < 40


@pytest.mark.parametrize("seed", SEEDS)
def test_a_technique_that_is_predicted_wrongly_does_not_hide_the_best(lattice: Lattice, seed: int) -> None:
    truth = Truth(make_job(), lattice, seed)
    best = truth.best(limit_for(truth, 0.5))
    assert best is not None
    wrong = best["checkpointing"]
    run = searched(truth, predictions=foreseen(truth, lambda c: 0.75 if c["checkpointing"] == wrong else 1.0))
    assert run.regret < WITHIN_TIES


@pytest.mark.parametrize("seed", SEEDS)
def test_predictions_of_some_configs_stand_in_for_the_others(lattice: Lattice, seed: int) -> None:
    truth = Truth(make_job(), lattice, seed)
    every = foreseen(truth, timed=True)
    some = {c: p for number, (c, p) in enumerate(every.by_config.items()) if number % 5}
    run = searched(truth, predictions=replace(every, by_config=some))
    assert run.regret < 0.06
    assert run.progress.done < 40
    for trial in run.saved:
        assert trial.prediction == some.get(trial.config)
    # What was not predicted is not ruled out by a prediction.
    assert not any(c not in some for c in run.search._adviser.acquisition.predicted_out())


@pytest.mark.parametrize("checkpointing", ["full", "none"])
def test_a_trial_of_what_was_only_guessed_leaves_what_was_predicted(truth: Truth, checkpointing: str) -> None:
    """As where there was no time to predict all: a wrong guess of one size is no error of the predicted ones."""
    every, limit = foreseen(truth, deviation=0.02), limit_for(truth, 0.5)
    some = {c: p for c, p in every.by_config.items() if c["checkpointing"] != checkpointing}
    guessed = [c for c in truth.lattice.configs if c not in some]

    def likely(tried: Config | None = None) -> set[Config]:
        acquisition, state = believing(truth, limit, replace(every, by_config=some))
        if tried is not None:
            state.take(tried)
            state.learn(make_trial(tried, fits(truth.memory(tried) / GIB, 100.0)))
        return {c.config for c in acquisition.candidates() if c.fit_probability > 0.5 and c.config in some}

    before = likely()
    for one in (min(guessed, key=truth.memory), max(guessed, key=truth.memory)):
        assert len(before ^ likely(one)) <= 0.05 * len(before)


@pytest.mark.parametrize("count", [0, 1, 60])
def test_too_few_predictions_change_nothing(lattice: Lattice, count: int) -> None:
    truth = Truth(make_job(), lattice, seed=0)
    every = foreseen(truth)
    few = dict(list(every.by_config.items())[:count])
    run = searched(truth, predictions=replace(every, by_config=few))
    assert [r.config for r in run.pool.submitted] == [r.config for r in searched(truth).pool.submitted]


@pytest.mark.parametrize("size", [1, 3])
def test_where_nothing_is_predicted_to_fit_the_lightest_are_tried(lattice: Lattice, size: int) -> None:
    """A prediction is no proof. Those that run are the lightest of each method, and the reason says what it is."""
    truth = Truth(make_job(), lattice, seed=0)
    lightest = min(truth.memory(c) for c in lattice.configs)
    run = prepare(truth, lightest // 2, size=size, predictions=foreseen(truth))
    run.search.plan = replace(run.search.plan, lower_bounds=dict.fromkeys(truth.lattice.configs, 0))
    run.search.run()
    tried = {r.config.text("method"): r.config for r in run.pool.submitted}
    assert len(tried) == run.progress.done == run.progress.out_of_memory > 1
    under_way_at_once = size
    for number, (method, config) in enumerate(tried.items()):
        # One at a time, what has run out may rule out the lightest of the next method.
        before = list(tried.values())[: max(0, number - under_way_at_once + 1)]
        out = {above for ran_out_before in before for above in lattice.above(ran_out_before)}
        left = [c for c in lattice.configs if c["method"] == method and c not in out]
        assert truth.memory(config) == min(map(truth.memory, left))
    assert run.search.winner() is None
    assert run.progress.stopped_because == "every config is measured or ruled out, or predicted not to fit"
    assert run.progress.ruled_out == len(lattice.configs) - len(tried)


def test_where_all_is_predicted_not_to_fit_and_does_it_is_found(lattice: Lattice) -> None:
    truth = Truth(make_job(), lattice, seed=0)
    run = searched(truth, 0.9, predictions=foreseen(truth, lambda config: 0.1, deviation=0.02))
    assert run.regret < WITHIN_TIES


def test_every_trial_carries_its_prediction(truth: Truth) -> None:
    predictions = foreseen(truth)
    run = searched(truth, predictions=predictions)
    assert any(verifying for *_, verifying in run.reports)
    assert all(trial.prediction == predictions.by_config[trial.config] for trial in run.saved)


@dataclass
class Telling:
    """A predictor that does what a test wants to see."""

    predict: Callable[[Report], Predictions]


def test_what_the_store_answers_is_not_predicted(truth: Truth) -> None:
    run = prepare(truth, limit_for(truth, 0.5), earlier=searched(truth).attempts())
    run.search.predictor = Telling(lambda report: pytest.fail("nothing must be run"))
    run.search.run()
    check_counts_of_memory(run)


def test_the_progress_of_estimating_is_shown_before_the_first_trial(truth: Truth) -> None:
    run = prepare(truth, limit_for(truth, 0.5))
    reported: list[tuple[int, int] | None] = []
    run.search.report = lambda progress: reported.append(progress.estimated)

    def predict(report: Report) -> Predictions:
        assert run.pool.submitted == []
        report(1, 2)
        report(2, 2)
        return Predictions()

    run.search.predictor = Telling(predict)
    run.search.run()
    assert [s for s in reported if s is not None] == [(1, 2), (2, 2)]
    assert reported[-1] is None


def compared(*errors: float) -> list[Trial]:
    """Trials whose measured memory is so far from what was predicted, as logarithms."""
    trial = make_trial(LATTICE.configs[0], fits(1.0, 100.0))
    return [replace(trial, prediction=predicted(GIB / math.exp(error), None)) for error in errors]


def ran_out(error: float) -> Trial:
    """A trial under a limit that is so far above what was predicted."""
    trial = make_trial(LATTICE.configs[0], out_of_memory(), limit=GIB)
    return replace(trial, prediction=predicted(GIB / math.exp(error), None))


def test_without_comparisons_the_error_is_the_stated_one() -> None:
    unpredicted = make_trial(LATTICE.configs[0], fits(1.0, 100.0))
    assert learned([]) == learned([unpredicted]) == NOTHING_COMPARED


ENDS = ("least", "most")


def test_the_error_stated_without_comparisons_is_that_of_the_records() -> None:
    recorded = Path(deviation.__file__).parents[3] / "benchmarks" / "recorded"
    published, processor, sharded = (
        json.loads((recorded / name).read_text(encoding="utf-8"))
        for name in ("published-estimates.json", "estimate-cpu.json", "cpu-zen5-2c-sharded-memory.json")
    )
    of_cards = published["largest_absolute_error"], published["several_gpus"]["largest_absolute_error"]
    kinds = [table["errors_by_kind"] for table in processor["tables"]]
    of_processor = [
        of[kind]["device_bytes"][end] for of in kinds for kind in ("offload", "other") if kind in of for end in ENDS
    ]
    for figure in (*(f"{error:.3f}" for error in of_cards), f"{max(map(abs, of_processor)):.2f}"):
        assert f" {figure} " in inspect.getsource(deviation)
    assert f" {abs(sharded['worst_error']):.2f} " in inspect.getsource(deviation)
    assert max(abs(math.log1p(error)) for error in (*of_cards, *of_processor)) <= 2 * UNKNOWN


def test_the_error_is_learnt_from_comparisons() -> None:
    """The mean tends to theirs, the deviation to theirs: from the stated one down where predictions are good."""
    errors = [learned(compared(*[0.10, 0.14] * count)) for count in (1, 5, 50, 500)]
    assert [abs(p.mean - 0.12) for p in errors] == sorted((abs(p.mean - 0.12) for p in errors), reverse=True)
    deviations = [p.deviation for p in errors]
    assert deviations == sorted(deviations, reverse=True)
    assert deviations[0] < UNKNOWN
    assert (errors[-1].mean, deviations[-1]) == pytest.approx((0.12, 0.024), abs=0.004)


def test_the_error_is_wide_where_predictions_were_bad() -> None:
    assert learned(compared(*[-0.5, 0.5] * 20)).deviation > 2 * UNKNOWN


def test_no_number_of_right_predictions_leaves_no_error() -> None:
    error = learned(compared(*[0.0] * 10**5))
    assert error.deviation == LEAST and memory_error(error.deviation).noise > 0


def test_what_ran_out_was_off_by_more_than_its_limit_shows() -> None:
    trials = compared(*[0.0, 0.02] * 10)
    assert learned([*trials, ran_out(0.3)]).mean > learned(trials).mean + 0.01
    assert learned([*trials, ran_out(0.3)]).deviation > learned(trials).deviation
    # That what was predicted far beyond its limit ran out shows nothing.
    assert learned([*trials, ran_out(-0.5)]) == learned(trials)


def test_what_a_formula_was_off_by_is_not_learnt() -> None:
    trials = compared(*[0.0, 0.02] * 10)
    by_formula = [
        replace(t, prediction=replace(t.prediction, memory_error=0.5)) for t in compared(0.5, 0.6) if t.prediction
    ]
    assert learned([*trials, *by_formula]) == learned(trials)


def test_what_another_version_was_off_by_is_not_learnt() -> None:
    trials = compared(*[0.0, 0.02] * 10)
    for work in (OLDER, None):  # None: of before it was recorded
        others = [replace(t, prediction=replace(t.prediction, work=work)) for t in compared(0.5, 0.6) if t.prediction]
        assert learned([*trials, *others]) == learned(trials)


def test_what_was_to_run_out_and_did_says_nothing_of_the_error(truth: Truth) -> None:
    limit = limit_for(truth, 0.3)
    sure = [c for c in truth.lattice.configs if truth.memory(c) > 2 * limit]
    assert len(sure) > 3

    def chances(measured: Sequence[Config]) -> list[float]:
        acquisition, state = believing(truth, limit, foreseen(truth, deviation=UNKNOWN))
        for config in measured:
            state.take(config)
            state.learn(truth.trial(config, limit))
        chance_of = {c.config: c.fit_probability for c in acquisition.candidates()}
        return [chance_of[c] for c in truth.lattice.configs if c in chance_of and truth.memory(c) < 1.5 * limit]

    before, after = chances([]), chances(sure)
    assert after == pytest.approx(before, abs=1e-3)


def test_the_lightest_is_tried_though_a_heavier_one_ran_out(truth: Truth) -> None:
    """All are predicted far beyond the limit, and only the lightest is not."""
    of_method = [c for c in truth.lattice.configs if c["method"] == "full"]
    lightest, *_, heaviest = sorted(of_method, key=truth.memory)
    limit = truth.memory(lightest) + 1
    acquisition, state = believing(truth, limit, foreseen(truth, lambda config: 0.2, deviation=0.02), floors=False)
    state.take(heaviest)
    state.learn(truth.trial(heaviest, limit))
    tried = {c.config for c in acquisition.worthwhile()}
    assert lightest in tried


def test_memory_of_the_host_says_nothing_of_the_devices() -> None:
    trial = ran_out(0.5)
    host = replace(trial, outcome=OutOfMemory(reason="killed", signal="SIGKILL", host=True))
    assert learned([host]) == NOTHING_COMPARED


def margin(predictions: Predictions, truth: Truth, measured: list[Config]) -> float:
    """The least predicted memory over the limit that is not run any more, when those are `measured`."""
    limit = limit_for(truth, 0.5)
    acquisition, state = believing(truth, limit, predictions)
    for config in measured:
        state.learn(truth.trial(config, limit))
    return min(predictions.by_config[c].device_bytes / limit for c in acquisition.predicted_out())


def test_the_margin_shrinks_with_what_is_seen(truth: Truth) -> None:
    """With comparisons on this hardware before the search, and with the search's own trials."""
    fitting = [c for c in truth.lattice.configs if truth.memory(c) <= limit_for(truth, 0.5)]
    unknown, known_well = (foreseen(truth, deviation=d) for d in (UNKNOWN, 0.02))
    assert margin(known_well, truth, fitting[:1]) < margin(unknown, truth, fitting[:1])
    margins = [margin(unknown, truth, fitting[:: len(fitting) // count]) for count in (1, 4, 20)]
    assert margins == sorted(margins, reverse=True) and margins[-1] < 1.1 < margins[0]


def test_a_stated_error_of_time_is_believed_between_bounds() -> None:
    """A guess says no more of a device's formats than what is expected without it, a fit never all."""
    good, fitted, guessed = time_error(0.01), time_error(0.12), time_error(1.0)
    assert (good.spread, fitted.spread, guessed.spread) == (LEAST_EFFECT, 0.12, TIME.spread)
    assert (fitted.spread_of["precision"], guessed.spread_of) == (0.12, TIME.spread_of)
    levels = [error.intercept_spread for error in (good, fitted, guessed)]
    assert levels == pytest.approx([math.log1p(LEAST_EFFECT), math.log(1.12), math.log(2.0)])


@pytest.mark.parametrize("seed", SEEDS)
def test_wrong_guesses_of_time_do_not_hide_the_best(lattice: Lattice, seed: int) -> None:
    """A data sheet knows nothing of emulated formats: here it has every precision the wrong way round."""
    truth = Truth(make_job(), lattice, seed)
    wrong = {"bf16": 2.0, "bf16-mixed": 1.0, "fp32": 0.5}
    every = foreseen(truth, timed=True)
    guesses = {
        c: replace(p, step_seconds=truth.seconds(c) * wrong[c.text("precision")], relative_error=1.0)
        for c, p in every.by_config.items()
    }
    run = searched(truth, 0.9, predictions=replace(every, by_config=guesses))
    assert run.regret < 0.06


def by_formula(predictions: Predictions, config: Config) -> Prediction:
    return replace(predictions.by_config[config], memory_error=0.5, work=None)


def test_predictions_by_formula_are_wide_themselves_alone(truth: Truth) -> None:
    narrow = foreseen(truth, deviation=0.02)
    limit, configs = limit_for(truth, 0.3), truth.lattice.configs
    rough = {c for c in configs if c["optimizer"] == "adamw-8bit"}
    mixed = replace(narrow, by_config={**narrow.by_config, **{c: by_formula(narrow, c) for c in rough}})

    def out(predictions: Predictions, *, measured: float | None = None) -> set[Config]:
        acquisition, state = believing(truth, limit, predictions)
        if measured is not None:
            one = min(rough, key=truth.memory)
            state.take(one)
            state.learn(make_trial(one, fits(measured * truth.memory(one) / GIB, 100.0)))
        return set(acquisition.predicted_out())

    traced = out(narrow) - rough
    assert traced and out(mixed) - rough == traced, "as if all were traced"
    assert out(mixed) & rough < out(narrow) & rough
    # What one formula was off by says little of the traces.
    assert len((out(mixed, measured=0.6) - rough) ^ traced) < len((out(narrow, measured=0.6) - rough) ^ traced)


def test_where_all_are_by_formula_they_share_its_error(truth: Truth) -> None:
    narrow = foreseen(truth, deviation=0.02)
    assert memory_errors(narrow.by_config, narrow.memory_deviation) == (memory_error(0.02), {})
    rough = {c: by_formula(narrow, c) for c in narrow.by_config}
    assert memory_errors(rough, narrow.memory_deviation) == (memory_error(math.log(1.5)), {})
    unsure = replace(narrow.memory_deviation, deviation=0.6)
    assert memory_errors(rough, unsure) == (memory_error(0.6), {})


def test_a_ruled_out_config_is_likely_not_to_fit_by_far(truth: Truth) -> None:
    acquisition, state = believing(truth, limit_for(truth, 0.5), foreseen(truth))
    out = set(acquisition.predicted_out())
    assert out
    assert out == {c.config for c in acquisition.candidates() if c.fit_probability < 1e-3}
    assert all(isinstance(truth.outcome(c, state.memory_limit_bytes), OutOfMemory) for c in out)
