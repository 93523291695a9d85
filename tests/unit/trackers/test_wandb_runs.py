"""Runs of the real W&B, offline: what lies in its folder is read back. A server is not there to test with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unit.operations.made_trials import MADE

from autofit.core.outcome import Fits
from autofit.store import Store
from autofit.trackers.tracked_trial import TrackedTrial

pytest.importorskip("wandb", reason="pip install 'autofit-llm[trackers]'")
ROOT = Path(__file__).parents[3]
BLOCK, FILE_HEADER, RECORD_HEADER = 32768, 7, 7
"""Of W&B's files: records as in LevelDB's log, each a protocol buffer."""


def track(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own: W&B reads its settings once."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    given |= {"PYTHONPATH": str(ROOT), "HOME": str(folder), "WANDB_DIR": str(folder), **environment}
    command = [sys.executable, "-m", "autofit", "track", "wandb", "--store", str(folder / "store.db")]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=given, cwd=folder)


def records(file: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), FILE_HEADER, b""
    while at < len(data):
        if BLOCK - at % BLOCK < RECORD_HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, part = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + RECORD_HEADER : at + RECORD_HEADER + length]
        at += RECORD_HEADER + length
        if part in (1, 4):  # whole, or the last of several
            yield Record.FromString(whole)
            whole = b""


def run_in(file: Path) -> SimpleNamespace:
    run: Any = None
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    code = None
    for record in records(file):
        if record.HasField("run") and run is None:
            run = record.run
            config |= {update.key: json.loads(update.value_json) for update in run.config.update}
        if record.HasField("config"):
            config |= {update.key: json.loads(update.value_json) for update in record.config.update}
        for update in record.summary.update:
            summary["/".join(update.nested_key) or update.key] = json.loads(update.value_json)
        if record.HasField("exit"):
            code = record.exit.exit_code
    assert run is not None
    return SimpleNamespace(
        id=run.run_id, group=run.run_group, project=run.project, config=config, summary=summary, code=code
    )


def test_a_run_is_a_trial_and_comes_once(store: Store, tmp_path: Path) -> None:
    total = len(MADE) + 1
    for new in (total, 0):
        done = track(tmp_path, WANDB_MODE="offline")
        assert done.returncode == 0, done.stderr
        verdict, note = done.stdout.splitlines()
        assert verdict == f"{total} trials in W&B at {tmp_path}/wandb (offline): {new} new"
        assert f"wandb sync {tmp_path}/wandb/offline-run-*" in note
    runs = {run.id: run for run in map(run_in, tmp_path.glob("wandb/offline-run-*/*.wandb"))}
    assert len(runs) == total
    for trial in store.trials():
        tracked = TrackedTrial(trial)
        run = runs[tracked.uid]
        assert (run.group, run.project) == (tracked.context, "autofit")
        assert run.config.items() >= trial.config.to_json().items()
        assert run.config["hardware"]["name"] == "h100-80g"
        assert run.summary.items() >= (tracked.facts | tracked.metrics).items()
        assert (run.code == 0) == isinstance(trial.outcome, Fits)


def test_the_project_is_the_users(store: Store, tmp_path: Path) -> None:
    assert track(tmp_path, WANDB_MODE="offline", WANDB_PROJECT="mine").returncode == 0
    assert {run_in(file).project for file in tmp_path.glob("wandb/offline-run-*/*.wandb")} == {"mine"}


@pytest.mark.parametrize(
    ("environment", "code", "words"),
    [
        ({}, 4, "WANDB_MODE=offline"),
        ({"WANDB_MODE": "disabled"}, 2, "WANDB_MODE is disabled"),
        ({"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": 40 * "0"}, 4, "http://127.0.0.1:9"),
    ],
)
def test_what_hinders_is_said_in_a_line(
    store: Store, tmp_path: Path, environment: dict[str, str], code: int, words: str
) -> None:
    done = track(tmp_path, **environment)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr


def test_what_the_server_has_is_not_sent_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's answer is made up: its list of runs in the project, or that there is no such project."""
    from autofit.trackers import wandb_runs

    trials = [TrackedTrial(trial) for trial in store.trials()]
    paths: list[str] = []

    def listed(path: str) -> list[Any]:
        paths.append(path)
        if len(paths) > 1:
            raise ValueError("Could not find project")
        return [SimpleNamespace(id=trials[0].uid)]

    settings = SimpleNamespace(mode="online", project=None, entity="team", wandb_dir="wandb")
    monkeypatch.setattr(wandb_runs.wandb, "setup", lambda given: SimpleNamespace(settings=settings))
    monkeypatch.setattr(wandb_runs.wandb, "Api", lambda: SimpleNamespace(runs=listed))
    tracker = wandb_runs.WandbRuns()
    assert [tracker.has(tracked) for tracked in trials[:2]] == [True, False]
    assert (tracker.place, tracker.note) == ("W&B at team/autofit", None)
    assert not wandb_runs.WandbRuns().has(trials[0])
    assert paths == ["team/autofit"] * 2
