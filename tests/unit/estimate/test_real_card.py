"""Estimates beside what ran on an H200 and an H100 (benchmarks/recorded): memory, and time by the card's own probe."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import estimate_trials
import pytest

from autofit.catalog.models import load
from autofit.core.outcome import Trial
from autofit.core.units import MIB
from autofit.estimate.assumptions import COMPILE_ERROR, SEEN_CONTEXT_BYTES
from autofit.estimate.estimate import Estimate
from autofit.estimate.estimator import Estimator
from autofit.estimate.memory.deviation import ONE_CARD
from autofit.estimate.tracing.trace_cache import TraceCache
from autofit.estimate.version import ESTIMATOR_VERSION
from autofit.techniques.job import Job

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

TABLES = [
    ("h200/search-8b", 6, 1e-4, 1e-4),
    ("h200/search-8b-earlier-probe", 6, 1e-4, 1e-4),
    ("h200/search-8b-24gib", 2, 1e-4, 0.01),
    ("h200/every-axis-llama-3.1-8b", 3, 1e-4, 0.01),
    ("h100/search-8b", 3, 1e-4, 1e-4),
    ("h100/search-8b-4-minutes", 12, 1e-4, 0.006),
    ("h100/search-8b-24gib", 7, 1e-4, 1e-4),
    ("h100/search-8b-40gib", 6, 1e-4, 1e-4),
    ("h100/every-axis-llama-3.2-1b", 1, 1e-4, 1e-3),
    ("h100/every-axis-qwen2.5-0.5b", 2, 1e-3, 1e-3),
    ("h100/every-axis-llama-3.1-8b", 1, 1e-4, 1e-3),  # adapters and whole logits: autograd's workspace decides
    ("h100/offloaded-checkpoints-llama-3.2-1b", 1, 1e-4, 1e-3),
    ("h100/lengths-llama-3.2-1b", 1, 1e-4, 1e-3),
]
"""Recorded tables, how many of their configs trained, and how far off what is allocated and reserved may be."""


@pytest.fixture(scope="module")
def compared() -> Callable[[str], list[Any]]:
    """Every trial of a table that fitted, with its estimate."""

    @cache
    def rows(table: str) -> list[Any]:
        trials, probe = estimate_trials.read(BENCHMARKS / "recorded" / f"{table}.jsonl")
        steps = (replace(step, work=replace(step.work, estimator=ESTIMATOR_VERSION)) for step in probe.steps)
        probe = replace(probe, steps=tuple(steps))  # whose work other versions count much alike
        found = estimate_trials.compared(trials, probe, TraceCache.of_user())
        return [row for row in found if row.measured is not None]

    return rows


@pytest.mark.parametrize(("table", "count", "allocated", "reserved"), TABLES)
def test_memory_is_what_the_card_showed(
    compared: Any, table: str, count: int, allocated: float, reserved: float
) -> None:
    rows = compared(table)
    assert len(rows) == count
    for row in rows:
        predicted, measured = row.estimate, row.measured
        assert predicted.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=allocated), (
            row.trial.config
        )
        assert predicted.peak_reserved_bytes == pytest.approx(measured.peak_reserved_bytes, rel=reserved), (
            row.trial.config
        )
        assert predicted.device_bytes == pytest.approx(measured.device_bytes, rel=0.015), row.trial.config


def test_before_any_trial_memory_is_as_sure_as_is_said(compared: Any) -> None:
    """With the context that is assumed where no probe has shown it."""
    rows = [row for table, *_ in TABLES for row in compared(table)]
    predicted = [row.estimate.peak_reserved_bytes + SEEN_CONTEXT_BYTES["9.0"] for row in rows]
    errors = [abs(math.log(row.measured.device_bytes / size)) for row, size in zip(rows, predicted, strict=True)]
    assert len(errors) >= 30
    assert max(errors) <= 2 * ONE_CARD
    assert sum(error <= ONE_CARD for error in errors) >= 0.84 * len(errors)


@pytest.mark.parametrize(
    ("table", "off", "order"),
    [
        ("h200/search-8b", 0.1, 1.0),
        ("h200/search-8b-24gib", 0.13, 1.0),
        ("h200/every-axis-llama-3.1-8b", 0.18, None),
        ("h100/search-8b-4-minutes", 0.16, 0.8),
        ("h100/search-8b-24gib", 0.31, None),  # four of seven wait for launches, all take nearly the same
        ("h100/search-8b-40gib", 0.1, None),
        ("h100/every-axis-llama-3.1-8b", 0.1, None),
        ("h100/every-axis-llama-3.2-1b", 0.1, None),
        ("h100/every-axis-qwen2.5-0.5b", 0.13, 1.0),
    ],
)
def test_a_step_takes_what_the_probe_foretells(compared: Any, table: str, off: float, order: float | None) -> None:
    """Before any trial, and nearly in the right order (Kendall's tau). The probe of h100/search-8b was cut short."""
    rows = compared(table)
    predicted = [row.speed(row.rates) for row in rows]
    measured = [row.measured.tokens_per_second for row in rows]
    for one, other, row in zip(predicted, measured, rows, strict=True):
        assert one == pytest.approx(other, rel=off), row.trial.config
    if order is not None:
        assert estimate_trials.kendall(predicted, measured) >= order


def test_a_quantised_base_is_built_without_holes(compared: Any) -> None:
    """The same config before and since 4-bit weights are made in a memory pool apart: 160 MiB less reserved."""
    before = next(row for row in compared("h100/search-8b-4-minutes") if row.trial.config["method"] == "qlora")
    since = next(row for row in compared("h100/compiled-llama-3.1-8b") if row.trial.config == before.trial.config)
    assert since.measured.peak_allocated_bytes == before.measured.peak_allocated_bytes
    assert before.measured.peak_reserved_bytes - since.measured.peak_reserved_bytes == 160 * MIB
    assert since.measured.losses[0] == before.measured.losses[0]
    assert since.estimate.peak_reserved_bytes == pytest.approx(since.measured.peak_reserved_bytes, rel=0.002)


def test_compilation_speeds_a_step_up_by_what_is_predicted_within_its_error(compared: Any) -> None:
    """Beside the same configs without it, which other recordings have, too."""
    of_processor = "memory/compiled-cpu-zen4-2c-smollm2-135m"
    rows = [row for table in (of_processor, "h100/compiled-llama-3.1-8b") for row in compared(table)]
    eager = {row.trial.config: row for row in (*compared("h100/search-8b-4-minutes"), *rows)}
    errors = []
    for row in (row for row in rows if row.trial.config["compile"]):
        without = eager[row.trial.config.replace(compile=False)]
        measured = without.measured.step_seconds.median / row.measured.step_seconds.median
        predicted = row.speed(row.rates) / without.speed(without.rates)
        assert predicted > 1.05
        errors.append(abs(predicted / measured - 1.0))
    assert len(errors) == 8
    assert f"{max(errors):.2f}" == f"{COMPILE_ERROR:.2f}"


def trainers_runs(file: str) -> Iterator[tuple[dict[str, Any], Estimate]]:
    """What trainers took that ran exported files, each with what is estimated of it."""
    for line in (BENCHMARKS / "recorded" / file).read_text().splitlines():
        row = json.loads(line)
        trial = Trial.from_json(row["trial"])
        job = Job(model=load(trial.workload.model), workload=trial.workload, hardware=trial.hardware, stack=trial.stack)
        estimator = Estimator(job, None, cache=TraceCache.of_user())
        yield row, estimator.estimate(trial.config, memory_limit_bytes=trial.memory_limit_bytes)


def test_a_trainers_own_run_takes_what_is_predicted() -> None:
    """transformers' and trl's own trainers on an H100, with the exported files: beside estimates, not trials."""
    for row, predicted in trainers_runs("h100/real-trainers.jsonl"):
        took = row["trainer"]
        assert predicted.peak_allocated_bytes == pytest.approx(took["peak_allocated_bytes"], rel=1.5e-4), row["case"]
        assert predicted.peak_reserved_bytes == pytest.approx(took["peak_reserved_bytes"], rel=2e-4), row["case"]


def test_a_trainers_run_of_layers_with_biases_takes_what_is_predicted() -> None:
    """On an emulated card, every method. There trl sees no labels and copies no tokens: its trial counts."""
    for row, predicted in trainers_runs("emulated-trainers.jsonl"):
        took = row["trainer"] if row["case"]["for"] == "transformers" else row["trial"]["measurement"]
        assert not predicted.memory_error, row["case"]
        assert predicted.peak_allocated_bytes == pytest.approx(took["peak_allocated_bytes"], rel=2.5e-3), row["case"]
        assert predicted.peak_reserved_bytes == pytest.approx(took["peak_reserved_bytes"], rel=0.01), row["case"]
