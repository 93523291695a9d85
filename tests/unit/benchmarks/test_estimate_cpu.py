"""The estimator against recorded trials: what the benchmark counts. Nothing is traced here."""

from __future__ import annotations

import importlib
import itertools
import json
import random
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from unit.bench.made_tables import lines_of, write
from unit.operations.made_trials import HARDWARE, STACK, fits, make_job, make_trial

from autofit.operations.recording import _covering
from autofit.outcome import Fits, OutOfMemory
from autofit.space import load
from autofit.techniques import AXES, complete, unsupported

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def script(importable: None) -> ModuleType:
    return importlib.import_module("estimate_cpu")


@pytest.fixture
def figures(importable: None) -> ModuleType:
    return importlib.import_module("cpu_figures")


@pytest.fixture
def reading(importable: None) -> ModuleType:
    return importlib.import_module("cpu_rows")


@pytest.fixture
def targets(importable: None) -> ModuleType:
    return importlib.import_module("cpu_targets")


def test_tau_counts_pairs(figures: ModuleType) -> None:
    assert figures.kendall([1, 2, 3], [10, 20, 30]) == 1
    assert figures.kendall([3, 2, 1], [10, 20, 30]) == -1
    assert figures.kendall([1, 3, 2], [10, 20, 30]) == pytest.approx(1 / 3)
    assert figures.kendall([1, 1, 2], [10, 20, 30]) == pytest.approx(2 / 3)


def test_fit_is_misjudged_where_a_limit_lies_between_the_two_sizes(figures: ModuleType) -> None:
    assert figures.misjudged([10, 20, 22], [10, 20, 30]) == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"median_absolute_error": 0.031}, ["memory, median absolute error: 0.031 (target: 0.03), missed"]),
        ({"fit_misjudged_at_the_limit": 0.023}, ["fit misjudged at the trials' limit: 0.023 (target: 0.02), missed"]),
        (
            {"speed": 0.16, "tau": 0.84},
            [
                "tokens/s after calibration, median absolute error: 0.160 (target: 0.15), missed",
                "Kendall's tau after calibration: 0.840 (target: 0.85), missed",
            ],
        ),
    ],
)
def test_a_missed_target_is_named(targets: ModuleType, changed: dict[str, float], missed: list[str]) -> None:
    at = {"median_absolute_error": 0.03, "fit_misjudged_at_the_limit": 0.02, "speed": 0.15, "tau": 0.85, **changed}
    time = {"tokens_per_second_error": {"median": at.pop("speed")}, "kendall_tau": {"median": at.pop("tau")}}
    found = targets.held_to_targets({"configs": 60, "memory": at, "time": time})
    assert len(found) == 4
    assert [str(one) for one in found if not one.reached] == missed
    assert targets.held_to_targets({"configs": 59, "memory": at, "time": time}) == []


def test_it_is_said_where_no_trial_is_near_its_limit(reading: ModuleType, targets: ModuleType) -> None:
    (far,) = reading.latest(reading.read(BENCHMARKS / "recorded" / "cpu-2c-every-axis.jsonl"))
    (near,) = reading.latest(reading.read(BENCHMARKS / "recorded" / "cpu-2c-smollm2-135m.jsonl"))
    said = [
        targets.beside_the_targets(
            {"memory": {"nearest_to_the_limit": targets.nearest_to_the_limit(trials), "fit_misjudged": share}}
        )
        for trials, share in ((far, 0.024), (near, 0.02))
    ]
    assert "no prediction could misjudge one" in said[0][0] and "no prediction" not in said[1][0]
    assert said[0][1].endswith("above 0.02") and said[1][1].endswith("within 0.02")


def test_a_covering_table_has_every_value_that_one_processor_trains_with() -> None:
    job = make_job(hardware=replace(HARDWARE, kind="cpu", cores=2), stack=replace(STACK, deepspeed="0.19.8"))
    every = load(str(BENCHMARKS / "every_axis.yaml"), AXES).configs(AXES, batch=4)
    configs = [config for config in every if unsupported(config, job) is None]
    random.Random(0).shuffle(configs)
    seen = Counter(value for config in _covering(configs, 66) for value in config.items)
    assert min(seen.values()) >= 5
    others = {(axis.name, value) for axis in AXES for value in axis.values if axis.name != "sharding"} - set(seen)
    trains = {value for value in others if unsupported(complete(dict([value])), job) is None}
    assert trains == {("precision", "fp16-mixed"), ("offload", "nvme")}, "the file's first lines say why"


def test_the_record_is_of_the_tables_that_are_judged_by_default(script: ModuleType, targets: ModuleType) -> None:
    record = json.loads((BENCHMARKS / "recorded" / "estimate-cpu.json").read_text())
    assert [table["table"] for table in record["tables"]] == [table.name for table in script.RECORDED]
    for table in record["tables"]:
        assert [asdict(target) for target in targets.held_to_targets(table)] == table["targets"]


def test_the_heap_is_fitted_to_what_most_trials_show(figures: ModuleType) -> None:
    shares = np.array([50e6, 0.1, 0.2, 0.3, 0.5])
    draw = random.Random(0)
    rows = []
    for index in range(40):
        causes = np.array([1.0, *(draw.uniform(1e8, 1e9) for _ in range(4))])
        off = 1.0 if index % 10 else 1.5  # one in ten is an outlier
        size = (1e9 + float(shares @ causes)) * off
        measured = SimpleNamespace(device_bytes=size)
        rows.append(SimpleNamespace(causes=causes, beside_bytes=1e9, measured=measured))
    found = figures.memory_errors(rows, figures.heap(rows))
    assert found["median_absolute_error"] < 0.01 and found["worst_error"] == pytest.approx(-1 / 3, abs=0.05)


def test_a_second_measurement_ranks_as_the_first_where_intervals_are_narrow(figures: ModuleType) -> None:
    def rows(spread: float) -> list[Any]:
        measured = [fits(1, speed) for speed in (100.0, 101.0, 102.0, 103.0)]
        return [
            SimpleNamespace(
                trial=SimpleNamespace(
                    outcome=Fits(
                        measurement=replace(
                            one.measurement,
                            step_seconds=replace(one.measurement.step_seconds, relative_spread=spread),
                        )
                    )
                ),
                measured=one.measurement,
            )
            for one in measured
        ]

    assert figures.repeated(rows(1e-6), seeds=5) == 1.0
    assert figures.repeated(rows(0.5), seeds=5) < 1.0


def test_what_axes_and_their_pairs_do_not_explain_is_told_from_what_they_do(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)

    def rows(noise: float) -> list[Any]:
        found = []
        for a, b, c in itertools.product(range(4), range(4), range(7)):
            missed = 0.3 * (a == 1) + 0.2 * (a == 2 and b == 3)  # by an axis, and by two together
            speed = float(np.exp(0.1 * a + 0.43 * b + 1.9 * c + missed + noise * draw.normal()))
            config = SimpleNamespace(to_json=lambda known={"a": a, "b": b, "c": c}: known)
            found.append(
                SimpleNamespace(
                    trial=SimpleNamespace(config=config),
                    measured=SimpleNamespace(tokens_per_second=speed),
                    predicted=float(np.exp(0.1 * a + 0.43 * b + 1.9 * c)),
                )
            )
        return found

    monkeypatch.setattr(figures, "speeds", lambda rows, learnt_from: [row.predicted for row in rows])
    exact, noisy = (figures.left_unexplained(rows(noise)) for noise in (1e-9, 0.1))
    assert exact["axes_together"] == 2 and exact["deviation"] < 1e-6 and exact["kendall_tau"] > 0.99
    assert noisy["deviation"] == pytest.approx(0.1, rel=0.3) and noisy["kendall_tau"] < exact["kendall_tau"]
    assert figures.left_unexplained(rows(0.1)[:3]) is None


def test_of_every_config_the_last_trial_in_full_counts(reading: ModuleType) -> None:
    job = make_job(hardware=replace(HARDWARE, kind="cpu", cores=2))
    early = fits(1, 30)
    early = Fits(measurement=replace(early.measurement, stopped_early=True))
    trials = [
        make_trial({"rank": 8, "method": "lora"}, outcome, job=job) for outcome in (fits(1, 10), fits(1, 20), early)
    ]
    other = make_trial({"rank": 16, "method": "lora"}, early, job=job)
    short = make_trial({"rank": 32, "method": "lora"}, OutOfMemory(reason="no room", phase="forward"), job=job)
    elsewhere = make_trial({}, fits(1, 1))
    assert reading.latest([*trials, other, elsewhere]) == [[trials[1], other], [elsewhere]]
    assert reading.latest([short]) == [[short]] and reading.latest(
        [trials[0], replace(short, config=trials[0].config)]
    ) == [[trials[0]]]


def test_passes_are_pooled_and_ranked_against_each_other(
    figures: ModuleType, reading: ModuleType, tmp_path: Path
) -> None:
    """Three configs that two passes rank the other way round, and one that fits in one of them alone."""
    first = [(8, fits(1, 10)), (16, fits(1, 20)), (32, fits(1, 40)), (64, fits(1, 80))]
    second = [(8, fits(1.5, 30)), (16, fits(1.1, 20)), (32, fits(1, 10)), (64, OutOfMemory(reason="no room"))]
    made = [make_trial({"rank": rank, "method": "lora"}, outcome) for rank, outcome in (*first, *second)]
    lines = lines_of(made)
    file = write(tmp_path / "t.jsonl", [*lines[:5], *({**line, "pass": 2} for line in lines[5:])])
    agree = {"kendall_tau": -1.0, "memory_median": 0.1, "memory_most": 0.5}
    assert figures.between_passes(file) == pytest.approx(agree)
    measured = [t.outcome.measurement for t in reading.read(file) if isinstance(t.outcome, Fits)]
    assert [m.tokens_per_second for m in measured] == pytest.approx([300**0.5, 20.0, 20.0])
    assert [m.device_bytes / 2**30 for m in measured] == pytest.approx([1.25, 1.05, 1.0])
    assert figures.between_passes(write(tmp_path / "once.jsonl", lines[:5])) is None


def test_recorded_trials_are_all_of_one_workload(reading: ModuleType, script: ModuleType) -> None:
    groups = {table.name: reading.latest(reading.read(table)) for table in script.RECORDED}
    assert {len(found) for found in groups.values()} == {1}
    assert len(groups) >= 4 and all(len(found[0]) > 10 for found in groups.values())


def test_what_is_judged_by_default_was_recorded_over_every_axis_of_one_processor_but_compile_and_offload(
    reading: ModuleType,
) -> None:
    (group,) = reading.latest(reading.read(BENCHMARKS / "recorded" / "cpu-2c-every-axis.jsonl"))
    assert len(group) >= 60
    varied = {axis.name for axis in AXES if len({trial.config.get(axis.name) for trial in group}) > 1}
    assert {axis.name for axis in AXES} - varied == {"compile", "offload", "sharding"}
