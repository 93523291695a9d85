"""The published runs: that what is compared is ours, and that what is predicted for the smallest still holds."""

from __future__ import annotations

import csv
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from autofit.techniques import unsupported

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("published")


def test_every_row_has_a_config_or_the_reason_why_it_is_left_out() -> None:
    with (BENCHMARKS / "published" / "measurements.csv").open(newline="") as lines:
        every = list(csv.DictReader(lines))
    assert all(bool(row["config"]) is bool(row["card"]) is not bool(row["left_out"]) for row in every)
    kept = [row for row in every if row["config"]]
    assert all(row["memory_metric"] == "torch peak allocated" for row in kept if row["note"] != "out of memory")
    assert all(f"micro_batch={row['micro_batch']}" in row["config"].split(",") for row in kept)
    assert {(row["method"], row["gpus"]) for row in kept} == {
        *((method, "1") for method in ("full", "lora", "qlora")), ("full", "2"), ("lora", "2"),
    }  # fmt: skip


@pytest.mark.parametrize("file", ["measurements.csv", "speeds.csv"])
def test_what_is_compared_is_a_config_that_we_support(published: ModuleType, file: str) -> None:
    found = list(published.runs(file))
    assert len(found) >= 19
    for run in found:
        assert unsupported(run.config, run.job) is None
        assert (run.config["sharding"] == "fsdp") is (run.job.workload.devices > 1)
    assert sum(run.ran_out for run in found) == (file == "measurements.csv")


def test_the_smallest_run_waits_for_launches_as_long_as_it_was_seen_to(published: ModuleType) -> None:
    found = published.speed(next(published.runs("speeds.csv")))
    assert found["launching"] == pytest.approx(1.0)
    assert found["ratio"] == pytest.approx(1.0, rel=0.2)


def test_the_record_is_judged_by_its_targets(published: ModuleType) -> None:
    speeds = json.loads((BENCHMARKS / "recorded" / "published-speeds.json").read_text())
    assert speeds["rows"] == len(speeds["listed"]) > 30
    found = published.speeds_judged(speeds["listed"])
    assert not found["reached"] and found["median_absolute_error"] == speeds["median_absolute_error"] <= 0.2
