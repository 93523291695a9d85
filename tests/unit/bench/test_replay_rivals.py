"""Every method on a small table, for real: Optuna's samplers, accelerate's loop, and our search."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
from unit.bench.made_tables import of_outcomes, recorded, run
from unit.operations.made_trials import crashed, fits, out_of_memory
from unit.search.made_truth import Truth

from autofit.bench import oracle, ours, rivals_of_practice, rivals_optuna
from autofit.bench.oracle import HORIZON, CannotRun, Trace
from autofit.bench.recorded import Recorded
from autofit.bench.replay import METHODS, SLOW, chosen
from autofit.bench.score import regret
from autofit.core.errors import UsageError
from autofit.core.lattice import Config
from autofit.core.outcome import Fits, Outcome

NEEDS = {"optuna-gp": "scipy"}
"""Packages that autofit itself does without."""


def needed(name: str) -> None:
    """Skip where a method's own package is missing."""
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{name} needs {NEEDS[name]}, which is not installed")


@pytest.fixture(scope="module")
def small(truth: Truth) -> Recorded:
    """Some forty full fine-tunings, a part of which runs out of memory."""
    table = recorded(
        truth, keep=lambda c: c["optimizer"] == "adamw" and c["loss"] == "full" and c["precision"] != "fp32"
    )
    assert 4 <= table.out_of_memory <= len(table.trials) - 4
    return table


def configs(trace: Trace) -> list[Config]:
    return [r.config for r in trace.runs]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_finds_something_and_goes_by_its_seed(
    name: str, small: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed(name)
    if name.startswith("optuna"):  # ten are random; then each of the Gaussian process takes up to a second
        monkeypatch.setattr(oracle, "MOST_ASKS", 11 if "-gp" in name else 40)
    traces = [run(small, METHODS[name], seed) for seed in (0, 0, 1)]
    assert traces[0] == traces[1]
    for trace in traces:
        assert trace.runs and set(configs(trace)) <= set(small.trials)
        assert trace.asks >= len(trace.runs)
        assert regret(trace.runs, small.best) < 0.5
        if not name.startswith("autofit"):
            assert len(set(configs(trace))) == len(trace.runs)  # what has run is not paid for again
    if name.startswith("optuna"):
        assert configs(traces[0]) != configs(traces[2])


@pytest.mark.parametrize("name", ["optuna-random", "optuna-tpe"])
def test_a_sampler_that_never_ends_is_ended(name: str, small: Recorded) -> None:
    needed(name)
    trace = run(small, METHODS[name])
    assert not trace.stopped
    assert len(trace.runs) == len(small.trials) or trace.asks == oracle.MOST_ASKS


def test_optuna_is_told_the_speed_and_the_constraint(small: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    create = rivals_optuna.optuna.create_study

    def kept(**arguments: Any) -> Any:
        made.append(create(**arguments))
        return made[-1]

    monkeypatch.setattr(rivals_optuna.optuna, "create_study", kept)
    run(small, METHODS["optuna-tpe"])
    trials = [t for t in made[-1].trials if t.state.is_finished()]
    feasible = [t for t in trials if t.constraints["over_limit"] <= 0]
    worst = [t for t in trials if t.constraints["over_limit"] > 0]
    assert feasible and all(t.value > 0 for t in feasible)
    assert worst and all(t.value == 0.0 for t in worst)
    assert {len(t.params) for t in trials} == {len(small.problem.axes)}


@pytest.mark.parametrize(
    ("name", "package", "said"),
    [
        ("optuna-gp", "scipy", "scipy"),
        ("falling-accelerate", "accelerate", "accelerate"),
    ],
)
def test_a_method_whose_package_is_missing_says_so(
    name: str, package: str, said: str, small: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    importing = builtins.__import__

    def without(module: str, *rest: Any, **more: Any) -> Any:
        if module.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return importing(module, *rest, **more)

    if find_spec(package) is None:
        with pytest.raises(CannotRun, match=said):
            run(small, METHODS[name])
    elif package == "accelerate":
        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(CannotRun, match=said):
            run(small, METHODS[name])
    else:
        pytest.skip(f"{package} is installed")


READINGS = {"": "bf16", "-mixed": "bf16-mixed"}
"""By the suffix of the methods' names, the precision that they take `bf16` for."""


def practice(truth: Truth, fit: Callable[[Config], bool], method: str = "full") -> Recorded:
    """A table where `fit` says what fits, and every axis that people turn by hand has two values or more."""
    configs = (c for c in truth.lattice.configs if method in (c["method"], "any"))
    return of_outcomes(truth, {c: fits(1.0, 100.0) if fit(c) else out_of_memory() for c in configs}, method=method)


def steps(trace: Trace, *axes: str) -> list[tuple[object, ...]]:
    """The values of some axes, in the order in which they ran."""
    return [tuple(r.config[axis] for axis in axes) for r in trace.runs]


@pytest.mark.parametrize(
    ("fit", "doubling", "falling", "checklist"),
    [
        (
            lambda c: True,
            [(2, "none"), (4, "none")],
            [(4, "none")],
            [(4, "none", "adamw")],
        ),
        (
            lambda c: c["micro_batch"] <= 2,
            [(2, "none"), (4, "none")],
            [(4, "none"), (2, "none")],
            [(4, "none", "adamw"), (4, "full", "adamw"), (4, "full", "adamw-8bit"), (2, "full", "adamw-8bit")],
        ),
        (
            lambda c: c["micro_batch"] == 1,
            [(2, "none"), (1, "none")],
            [(4, "none"), (2, "none"), (1, "none")],
            [
                *((4, "none", "adamw"), (4, "full", "adamw"), (4, "full", "adamw-8bit")),
                *((2, "full", "adamw-8bit"), (1, "full", "adamw-8bit")),
            ],
        ),
        (
            lambda c: c["checkpointing"] == "full",
            [(2, "none"), (1, "none"), (2, "full"), (4, "full")],
            [(4, "none"), (2, "none"), (1, "none"), (4, "full")],
            [(4, "none", "adamw"), (4, "full", "adamw")],
        ),
    ],
)
def test_what_people_do_by_hand(
    truth: Truth,
    fit: Callable[[Config], bool],
    doubling: list[tuple[object, ...]],
    falling: list[tuple[object, ...]],
    checklist: list[tuple[object, ...]],
) -> None:
    # The loss is fixed, for with one sequence there is no chunked one.
    table = practice(truth, fit)
    table = of_outcomes(truth, {c: t.outcome for c, t in table.trials.items() if c["loss"] == "full"})
    by_name: Mapping[str, list[tuple[object, ...]]] = {"doubling-lightning": doubling, "falling-accelerate": falling}
    for (name, expected), (suffix, precision) in itertools.product(by_name.items(), READINGS.items()):
        trace = run(table, METHODS[name + suffix])
        assert (steps(trace, "micro_batch", "checkpointing"), trace.stopped) == (expected, True), name
        assert {r.config["precision"] for r in trace.runs} == {precision}
        assert {r.config["optimizer"] for r in trace.runs} == {"adamw"}
    for suffix, precision in READINGS.items():
        trace = run(table, METHODS["checklist" + suffix])
        assert steps(trace, "micro_batch", "checkpointing", "optimizer") == checklist
        assert {r.config["precision"] for r in trace.runs} == {precision}
        assert isinstance(trace.runs[-1].outcome, Fits) and trace.stopped


def test_by_hand_over_a_whole_table_the_most_faithful_method_comes_first(truth: Truth) -> None:
    easy, hard = (practice(truth, fit, "any") for fit in (lambda c: True, lambda c: c["method"] == "qlora"))
    for name in rivals_of_practice.RIVALS:
        assert {r.config["method"] for r in run(easy, METHODS[name]).runs} == {"full"}, name
    tried = [method for method, _ in itertools.groupby(steps(run(hard, METHODS["falling-accelerate"]), "method"))]
    assert tried == [("full",), ("lora",), ("qlora",)]
    # The checklist comes to QLoRA after everything else, and keeps the settings that it had by then.
    last = [r.config for r in run(hard, METHODS["checklist"]).runs][-2:]
    assert [(c["method"], c["micro_batch"], c["checkpointing"]) for c in last] == [
        ("full", 1, "full"),
        ("qlora", 1, "full"),
    ]


@pytest.mark.parametrize("name", ["autofit", "optuna-tpe"])
def test_over_a_whole_table_a_faithful_method_counts_more_than_speed(name: str, truth: Truth) -> None:
    """With full fine-tuning slower than anything else, what each method ends with is full fine-tuning all the same."""
    speeds = {"full": 100.0, "lora": 300.0, "qlora": 200.0}
    configs = [c for c in truth.lattice.configs if c["precision"] == "bf16" and c["loss"] == "full"]
    table = of_outcomes(truth, {c: fits(1.0, speeds[c.text("method")]) for c in configs}, method="any")
    trace = run(table, METHODS[name])
    assert table.best.method == "full"
    assert regret(trace.runs, table.best) == 0.0


def test_where_nothing_people_try_fits_they_end(truth: Truth) -> None:
    table = practice(truth, lambda c: c["precision"] == "fp32" and c["checkpointing"] == "every-2")
    for name in rivals_of_practice.RIVALS:
        trace = run(table, METHODS[name])
        assert trace.stopped and not any(isinstance(r.outcome, Fits) for r in trace.runs)


def test_our_search_is_the_real_one(truth: Truth) -> None:
    table = recorded(truth)
    trace = run(table, ours.search)
    assert trace.stopped
    assert len(trace.runs) < HORIZON
    # The winner has run twice, and that was paid for; nothing else has.
    again = [c for c in configs(trace) if configs(trace).count(c) > 1]
    assert len(again) == 2 and len(set(again)) == 1
    assert regret(trace.runs, table.best) < 0.05


def test_a_crash_ends_no_method(truth: Truth) -> None:
    outcomes: dict[Config, Outcome] = {}
    of_one = [c for c in truth.lattice.configs if c["method"] == "full" and c["precision"] == "bf16"]
    for number, config in enumerate(of_one):
        outcomes[config] = crashed() if number % 2 else fits(1.0, 100.0 + number)
    table = of_outcomes(truth, outcomes)
    for name in ("autofit", "optuna-tpe"):
        trace = run(table, METHODS[name])
        assert any(isinstance(r.outcome, Fits) for r in trace.runs), name


def test_a_model_that_is_not_here(small: Recorded) -> None:
    for change, said in (
        ({"model": "nobodys-model"}, "nobodys-model"),
        ({"model_digest": "0" * 16}, "a different architecture"),
    ):
        workload = replace(small.problem.workload, **change)
        table = Recorded(problem=replace(small.problem, workload=workload), trials=small.trials)
        with pytest.raises(CannotRun, match=said):
            run(table, ours.search)


def test_methods_are_chosen_by_name() -> None:
    assert {*chosen([]), *SLOW} == set(METHODS) and not {*chosen([])} & {*SLOW} and next(iter(METHODS)) == "autofit"
    assert list(chosen(SLOW)) == list(SLOW)
    assert list(chosen(["optuna-tpe", "autofit"])) == ["optuna-tpe", "autofit"]
    with pytest.raises(UsageError, match=r"unknown search method 'optuna-tpee': did you mean optuna-tpe"):
        chosen(["optuna-tpee"])
    with pytest.raises(UsageError, match="twice"):
        chosen(["autofit", "autofit"])
