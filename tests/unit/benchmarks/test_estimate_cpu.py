"""The estimator against recorded trials: what the benchmark counts. Nothing is traced here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from unit.operations.made_trials import HARDWARE, fits, make_job, make_trial

from autofit.outcome import Fits

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("estimate_cpu")


def test_tau_counts_pairs(script: ModuleType) -> None:
    assert script.kendall([1, 2, 3], [10, 20, 30]) == 1
    assert script.kendall([3, 2, 1], [10, 20, 30]) == -1
    assert script.kendall([1, 3, 2], [10, 20, 30]) == pytest.approx(1 / 3)
    assert script.kendall([1, 1, 2], [10, 20, 30]) == pytest.approx(2 / 3)


def test_fit_is_misjudged_where_a_limit_lies_between_the_two_sizes(script: ModuleType) -> None:
    rows = [
        SimpleNamespace(measured=SimpleNamespace(device_bytes=m), predicted=SimpleNamespace(device_bytes=p))
        for m, p in ((10, 10), (20, 20), (30, 22))
    ]
    assert script.misjudged(rows) == pytest.approx(1 / 6)


def test_of_every_config_the_last_trial_in_full_counts(script: ModuleType) -> None:
    job = make_job(hardware=replace(HARDWARE, kind="cpu", cores=2))
    early = fits(1, 30)
    early = Fits(measurement=replace(early.measurement, stopped_early=True))
    trials = [
        make_trial({"rank": 8, "method": "lora"}, outcome, job=job) for outcome in (fits(1, 10), fits(1, 20), early)
    ]
    other = make_trial({"rank": 16, "method": "lora"}, early, job=job)
    assert script.latest([*trials, other, make_trial({}, fits(1, 1))]) == [[trials[1], other]]


@pytest.mark.parametrize("name", ["cpu-2c-every-axis.jsonl", "cpu-2c-main-job-trials.jsonl"])
def test_recorded_trials_are_all_of_one_workload(script: ModuleType, name: str) -> None:
    (group,) = script.latest(script.read(BENCHMARKS / "recorded" / name))
    assert len(group) > 10


def test_what_is_judged_by_default_was_recorded_over_every_axis(script: ModuleType) -> None:
    (group,) = script.latest(script.read(script.RECORDED))
    assert len(group) >= 60
    for axis in ("method", "rank", "targets", "precision", "micro_batch", "checkpointing", "optimizer", "attention"):
        assert len({trial.config.get(axis) for trial in group}) > 1
