"""Estimates beside trials that ran on an H200 (benchmarks/recorded/h200): memory, and time by the card's own probe."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autofit.estimate.version import ESTIMATOR_VERSION

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def compared() -> Callable[[str], list[Any]]:
    """Every trial of a table that fitted, with its estimate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        module = importlib.import_module("estimate_trials")

    @cache
    def rows(table: str) -> list[Any]:
        trials, probe = module.read(BENCHMARKS / "recorded" / "h200" / f"{table}.jsonl")
        steps = (replace(step, work=replace(step.work, estimator=ESTIMATOR_VERSION)) for step in probe.steps)
        probe = replace(probe, steps=tuple(steps))  # whose work other versions count much alike
        return [row for row in module.compared(trials, probe) if row.measured is not None]

    return rows


@pytest.mark.parametrize(("table", "count"), [("search-8b", 6), ("search-8b-24gib", 2), ("every-axis-llama-3.1-8b", 3)])
def test_memory_is_what_the_card_showed(compared: Any, table: str, count: int) -> None:
    rows = compared(table)
    assert len(rows) == count
    for row in rows:
        said, shown = row.estimate, row.measured
        assert said.peak_allocated_bytes == pytest.approx(shown.peak_allocated_bytes, rel=1e-4), row.trial.config
        assert said.peak_reserved_bytes == pytest.approx(shown.peak_reserved_bytes, rel=0.01), row.trial.config
        assert said.device_bytes == pytest.approx(shown.device_bytes, rel=0.015), row.trial.config


def test_a_full_step_takes_what_the_probe_foretells(compared: Any) -> None:
    """Before any trial, and in the right order."""
    rows = sorted(compared("search-8b"), key=lambda row: -row.measured.tokens_per_second)
    said = [row.speed(row.rates) for row in rows]
    assert said == sorted(said, reverse=True)
    for speed, row in zip(said, rows, strict=True):
        assert speed == pytest.approx(row.measured.tokens_per_second, rel=0.1), row.trial.config
