"""Predictions beside measurements: what is compared, and what counts as reached."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from unit.operations.made_trials import fits, make_trial

from autofit.operations import read_table
from autofit.outcome import Crashed, Fits, OutOfMemory, Trial

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TABLE = BENCHMARKS / "recorded" / "cpu-2c-every-axis.jsonl"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("estimate_trials")


def recorded() -> list[Trial]:
    """Three trials that fitted, without their predictions."""
    return [t for t in read_table(TABLE) if isinstance(t.outcome, Fits) and t.config["compile"] is False][:3]


def made_guess(*, sizes: tuple[float, float, float], seconds: float | None = None, fits: bool = True) -> Any:
    """A prediction of these sizes: allocated, reserved and device memory."""
    allocated, reserved, device = sizes
    return SimpleNamespace(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_bytes=device,
        host_bytes=0,
        step_seconds=seconds,
        calibrated_on=0,
        fits=fits,
    )


def test_every_trial_stands_beside_its_prediction_after_the_others(script: ModuleType) -> None:
    trials = recorded()
    short = replace(trials[2], outcome=OutOfMemory(reason="no room", phase="forward"))
    rows = script.compared([*trials[:2], short])
    assert [row.calibrated.calibrated_on for row in rows] == [1, 1, 2], "no trial is among those that foretell it"
    for row, trial in zip(rows[:2], trials, strict=False):
        assert isinstance(trial.outcome, Fits)
        assert row.memory_error() == row.guessed.device_bytes / trial.outcome.measurement.device_bytes - 1
        assert row.time_error(row.guessed) != row.time_error(row.calibrated)
        assert not row.misjudged
    assert rows[2].misjudged and rows[2].memory_error() is None
    found = script.summary(rows)
    assert (found["configs"], found["trained"], found["fit_misjudged"]) == (3, 2, 1)
    errors = [abs(row.memory_error()) for row in rows[:2]]
    assert found["errors"]["device_bytes"]["median_absolute"] == sum(errors) / 2
    assert found["errors"]["device_bytes"]["p95_absolute"] == max(errors)
    written = json.loads(json.dumps([row.to_json() for row in rows]))
    assert written[0]["measured"]["host_bytes"] > 0 and written[2]["measured"] is None
    assert "does not" not in script.text(rows[2]) and script.text(rows[2]).startswith("out of memory; predicted: fits")


@pytest.mark.parametrize(
    ("off", "asked", "status"),
    [
        (1.02, ["--memory", "0.03", "--time", "100"], 0),
        (1.04, ["--memory", "0.03", "--time", "100"], 1),
        (1.04, ["--time", "100"], 0),
        (1.02, ["--memory", "0.03", "--time", "0.9"], 1),
        (1.02, [], 0),
        (1.04, [], 1),
    ],
)
def test_the_limits_that_are_asked_for_or_else_the_targets_decide_the_exit_status(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, off: float, asked: list[str], status: int
) -> None:
    trial = recorded()[0]
    file = tmp_path / "found.json"
    assert status_of(script, monkeypatch, [trial], [*asked, "--json", str(file)], off=off) == status
    (found,) = json.loads(file.read_text())
    assert found["rows"][0]["memory_errors"]["device_bytes"] == pytest.approx(off - 1, abs=1e-6)


def status_of(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    trials: list[Trial],
    asked: list[str],
    *,
    off: float = 1.0,
    seconds: float | None = 2.0,
) -> int:
    """The exit status for a table of these trials, whose predictions are `off` times the measured memory and `seconds`
    times the measured time; what ran out of memory is foreseen."""

    def row(trial: Trial) -> Any:
        if not isinstance(trial.outcome, Fits):
            guessed = made_guess(sizes=(1, 1, 1), fits=False)
        else:
            measured = trial.outcome.measurement
            size, taken = int(off * measured.device_bytes), measured.step_seconds.median
            guessed = made_guess(sizes=(size, size, size), seconds=None if seconds is None else seconds * taken)
        return script.Row(trial=trial, guessed=guessed, calibrated=guessed)

    monkeypatch.setattr(script, "read", lambda table: trials)
    monkeypatch.setattr(script, "compared", lambda group: [row(trial) for trial in group])
    monkeypatch.setattr("sys.argv", ["estimate_trials.py", "t.jsonl", *asked])
    return int(script.main())


def test_what_crashed_or_never_trained_is_not_as_asked_for(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, third = recorded()
    short = replace(other, outcome=OutOfMemory(reason="no room", phase="forward"))
    crashed = replace(other, outcome=Crashed(reason="killed by signal 9"))
    asked = ["--memory", "0.03", "--time", "100"]

    def status(trials: list[Trial], *more: str, **kwargs: Any) -> int:
        return status_of(script, monkeypatch, trials, [*asked, *more], **kwargs)

    assert status([one, short]) == 0
    assert status([one, crashed]) == 1
    said = capsys.readouterr().out
    assert f"not compared: crashed: killed by signal 9   {other.config}" in said and "1 failed in another way" in said
    assert status([crashed, one, other]) == 0, "a later trial of it trained"
    assert status([short]) == 1, "that nothing fits is foreseen, and no prediction is shown to be right"
    assert status([one], seconds=None) == 1, "a time that is not predicted is not within the limit"
    value = str(one.config["optimizer"])
    assert status([one, third], "--trained", f"optimizer={value}") == 0
    assert status([one, third], "--trained", f"optimizer={value},sgd") == 1
    assert status([one], "--trained", "compile=false") == 0
    assert "none trained with optimizer=sgd" in capsys.readouterr().out


@pytest.mark.parametrize("asked", [["--trained", "offload=none"], ["--time", "1", "--trained", "offload="]])
def test_values_that_must_train_are_refused_where_they_are_not_understood(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        status_of(script, monkeypatch, [], asked)
    assert ended.value.code == 2


def gpu_rows(script: ModuleType, errors: list[tuple[float, float]], *, compiled: int = 0, misjudged: int = 0) -> Any:
    """Rows on a GPU, of which the first are compiled, with these relative errors of allocated and reserved memory."""
    rows = []
    for place, (allocated, reserved) in enumerate(errors):
        trial = make_trial({"compile": place < compiled}, fits(20, 512, allocated=10))
        measured = trial.outcome.measurement
        sizes = (1 + allocated) * measured.peak_allocated_bytes, (1 + reserved) * measured.peak_reserved_bytes
        guessed = made_guess(sizes=(*sizes, measured.device_bytes), fits=place >= misjudged)
        rows.append(script.Row(trial=trial, guessed=guessed, calibrated=guessed))
    return rows


@pytest.mark.parametrize(
    ("errors", "misjudged", "missed"),
    [
        ([(0.0099, 0.0299)] * 100, 1, []),
        ([(0.011, -0.031)] * 100, 2, ["peak allocated, median", "peak reserved, median", "fit misjudged"]),
        ([(0.0, 0.0)] * 95 + [(-0.5, 0.5)] * 5, 0, []),
        ([(0.0, 0.0)] * 94 + [(-0.5, 0.5)] * 6, 0, ["peak allocated, 95th percentile"]),
    ],
)
def test_a_gpus_figures_stand_beside_their_targets(
    script: ModuleType, errors: list[tuple[float, float]], misjudged: int, missed: list[str]
) -> None:
    rows = gpu_rows(script, errors, misjudged=misjudged)
    figures = script.FIGURES["cuda"]
    assert [figure.name for figure in figures if not figure.reached(rows)] == missed
    said = script.figures_text("all", "cuda", rows).splitlines()
    assert [line.split("  ")[0] for line in said if "MISSED" in line] == missed
    assert sum("reached" in line for line in said) == 4 - len(missed)


def test_compiled_configs_are_told_apart_and_the_farthest_off_are_listed(script: ModuleType) -> None:
    rows = gpu_rows(script, [(0.2, 0.0), (0.004, -0.3), (0.006, 0.0), (0.0, 0.0)] * 2, compiled=1, misjudged=8)
    rows = [*rows[:4], *gpu_rows(script, [(0.0, 0.0)] * 4)]
    found = {figure.name: figure.of(rows[1:4]) for figure in script.FIGURES["cuda"]}
    assert found["peak allocated, median"] == pytest.approx(0.004)
    median = next(line for line in script.figures_text("all", "cuda", rows[:4]).splitlines() if "allocated, m" in line)
    assert median.split()[3:] == ["1.0%", "0.5%", "reached", "0.4%"], "half of the way from 0.4 % to 0.6 %"
    assert script.farthest(rows)[:3] == [rows[1], rows[0], rows[2]], "those that were misjudged come first"
    assert script.FIGURES["cuda"][0].reached([]) is False, "nothing shows nothing"


def test_nothing_to_compare_is_an_error(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(script, monkeypatch, [], []) == 2
    assert "no config" in capsys.readouterr().err
