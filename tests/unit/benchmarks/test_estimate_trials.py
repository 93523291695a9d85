"""Predictions beside measurements: what is compared, and what counts as reached."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from autofit.operations import read_table
from autofit.outcome import Fits, OutOfMemory, Trial

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TABLE = BENCHMARKS / "recorded" / "cpu-2c-every-axis.jsonl"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("estimate_trials")


def recorded() -> list[Trial]:
    """Three trials that fitted, without their predictions."""
    return [t for t in read_table(TABLE) if isinstance(t.outcome, Fits) and t.config["compile"] is False][:3]


def with_memory(trial: Trial, device_bytes: int) -> Trial:
    assert isinstance(trial.outcome, Fits)
    measured = replace(trial.outcome.measurement, device_bytes=device_bytes)
    return replace(trial, outcome=Fits(measurement=measured))


def test_every_trial_stands_beside_its_prediction_after_the_others(script: ModuleType) -> None:
    trials = recorded()
    short = replace(trials[2], outcome=OutOfMemory(reason="no room", phase="forward"))
    rows = script.compared([*trials[:2], short])
    assert [row.calibrated.calibrated_on for row in rows] == [1, 1, 2], "no trial is among those that foretell it"
    for row, trial in zip(rows[:2], trials, strict=False):
        assert isinstance(trial.outcome, Fits)
        assert row.memory_error == row.guessed.device_bytes / trial.outcome.measurement.device_bytes - 1
        assert row.time_error(row.guessed) != row.time_error(row.calibrated)
        assert not row.misjudged
    assert rows[2].misjudged and rows[2].memory_error is None
    found = script.summary(rows)
    assert (found["configs"], found["trained"], found["fit_misjudged"]) == (3, 2, 1)
    assert found["memory"]["median_absolute_error"] == sum(abs(row.memory_error) for row in rows[:2]) / 2
    written = json.loads(json.dumps([row.to_json() for row in rows]))
    assert written[0]["measured"]["host_bytes"] > 0 and written[2]["measured"] is None
    assert "does not" not in script.text(rows[2]) and script.text(rows[2]).startswith("out of memory; predicted: fits")


@pytest.mark.parametrize(("off", "status"), [(1.02, 0), (1.04, 1)])
def test_the_targets_decide_the_exit_status(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, off: float, status: int
) -> None:
    (row,) = script.compared(recorded()[:1])
    told = with_memory(row.trial, int(row.guessed.device_bytes / off))
    monkeypatch.setattr(script, "read", lambda table: [told])
    file = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["estimate_trials.py", "t.jsonl", "--time", "100", "--json", str(file)])
    assert script.main() == status
    (found,) = json.loads(file.read_text())
    assert found["within"] == 1 - status
    assert found["rows"][0]["memory_error"] == pytest.approx(off - 1, abs=1e-6)


def test_nothing_to_compare_is_an_error(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing: list[Any] = []
    monkeypatch.setattr(script, "read", lambda table: nothing)
    monkeypatch.setattr("sys.argv", ["estimate_trials.py", "t.jsonl"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2 and "no config" in capsys.readouterr().err
