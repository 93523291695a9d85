"""A recording is an extra: it shows one step, and whatever happens to it, the measurement stands."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jobs import tiny_model, tiny_request
from kept import Kept

from autofit.core.errors import UsageError
from autofit.core.outcome import Fits, OutOfMemory
from autofit.operations import WorkloadOptions, single_trial
from autofit.operations.single_trial import trial
from autofit.techniques import complete
from autofit.trial.measure.recording import check_writable, memory_snapshot
from autofit.trial.process.runner import TrialRunner

CONFIG = complete({"micro_batch": 2})


@pytest.fixture
def options(tmp_path: Path) -> WorkloadOptions:
    (tmp_path / "config.json").write_text(json.dumps(tiny_model().config))
    return WorkloadOptions(model=str(tmp_path), seq_len=32, global_batch=4)


def test_a_profile_shows_a_step_and_is_an_ordinary_trial(
    options: WorkloadOptions, tmp_path: Path, warm: TrialRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(warm, changed=lambda request: replace(request, timing_seconds=0.0))
    monkeypatch.setattr(single_trial, "GroupRunner", kept)
    file = tmp_path / "trace.json"
    done = trial(options, CONFIG, device="cpu", profile=str(file))
    assert isinstance(done.outcome, Fits)
    names = {event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]}
    assert any("backward" in name.lower() for name in names) and any("adamw" in name.lower() for name in names)


def test_a_dump_that_fails_loses_nothing(tmp_path: Path, warm: TrialRunner) -> None:
    outcome = warm.attempt(tiny_request(timing_seconds=0.1, profile=str(tmp_path / "no" / "trace.json"))).outcome
    assert isinstance(outcome, Fits)


def test_a_trial_that_does_not_fit_records_nothing_and_says_so(
    options: WorkloadOptions,
    tmp_path: Path,
    warm: TrialRunner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(single_trial, "GroupRunner", Kept(warm))
    file = tmp_path / "trace.json"
    with caplog.at_level(logging.WARNING):
        done = trial(options, CONFIG, device="cpu", profile=str(file), memory_limit_bytes=1024**2)
    assert isinstance(done.outcome, OutOfMemory)
    assert not file.exists()
    assert "nothing was recorded" in caplog.text and "out_of_memory" in caplog.text


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    options: WorkloadOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **named: object) -> None:
        raise AssertionError("a trial was started")

    monkeypatch.setattr(TrialRunner, "attempt", never)
    for path in (tmp_path / "missing" / "trace.json", tmp_path):
        with pytest.raises(UsageError, match=r"--profile .* cannot be written"):
            trial(options, CONFIG, device="cpu", profile=str(path))
    with pytest.raises(UsageError, match=r"--snapshot needs a CUDA device"):
        trial(options, CONFIG, device="cpu", snapshot=str(tmp_path / "snapshot"))


def test_looking_changes_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("old")
    check_writable(str(kept), "--profile")
    check_writable(str(tmp_path / "new"), "--profile")
    assert kept.read_text() == "old" and not (tmp_path / "new").exists()


class _History:
    """The allocator's history of a CUDA device that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self._record)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self._dump)

    def _record(self, enabled: str | None = "all", **settings: object) -> None:
        self.calls.append("off" if enabled is None else "on")

    def _dump(self, filename: str) -> None:
        self.calls.append("dump")
        Path(filename).write_bytes(b"snapshot")


def test_a_snapshot_covers_the_step_and_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    history = _History(monkeypatch)
    memory_snapshot(str(tmp_path / "snapshot"), lambda: history.calls.append("step"))
    assert history.calls == ["on", "step", "dump", "off"]
    assert (tmp_path / "snapshot").read_bytes() == b"snapshot"


def test_a_snapshot_that_fails_is_no_file_and_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    history = _History(monkeypatch)
    memory_snapshot(str(tmp_path / "missing" / "snapshot"), lambda: None)

    def step() -> None:
        raise torch.OutOfMemoryError("one more step")

    memory_snapshot(str(tmp_path / "snapshot"), step)
    assert not (tmp_path / "snapshot").exists()
    assert history.calls.count("on") == 2
