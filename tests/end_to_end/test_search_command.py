"""The main job as a user runs it: the real command, real trials of a small model, real Ray, a real store."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import tiny_model

from autofit.frontier import Frontier, Point
from autofit.outcome import Fits
from autofit.store import Store

SPACE = """
purpose: A handful of configs for tests.
axes:
  method: [lora, full]
  precision: [bf16, fp32]
  micro_batch: [1, 4]
  checkpointing: [full, none]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with a model of some ten million parameters and a search space."""
    model = tmp_path / "small"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny_model(vocabulary=16384, hidden=384, layers=4).config))
    (tmp_path / "space.yaml").write_text(SPACE)
    return tmp_path


def command(folder: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "autofit.cli.main", "search", "--model", str(folder / "small")),
        *("--seq-len", "128", "--global-batch", "4", "--space", str(folder / "space.yaml")),
        *("--store", str(folder / "store.db"), "--json", *more),
    ]


def run(folder: Path, *more: str, expect: int = 0) -> tuple[Any, str]:
    done = subprocess.run(command(folder, *more), capture_output=True, text=True, timeout=280)
    assert done.returncode == expect, done.stderr
    return json.loads(done.stdout) if expect == 0 else None, done.stderr


def trials(folder: Path) -> list[Any]:
    if not (folder / "store.db").exists():
        return []
    with Store.open(str(folder / "store.db")) as store:
        return store.trials()


def strays(folder: Path) -> list[str]:
    """Command lines of processes that a search of this test's folder left behind; Ray's agents end by themselves."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                environment = (process / "environ").read_bytes()
            except OSError:
                continue
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            if f"AUTOFIT_TEST_FOLDER={folder}".encode() in environment.split(b"\0") and "Agent" not in line:
                found.append(line)
    return found


def wait_until_gone(folder: Path, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while strays(folder) and time.monotonic() < until:
        time.sleep(0.2)
    assert strays(folder) == []


def test_search_through_ray_ends_with_an_answer_and_is_then_answered_from_the_store(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOFIT_TEST_FOLDER", str(folder))
    first, progress = run(folder, "--memory-limit", "2GiB", "--max-trials", "6")
    assert first["trials"] >= 4
    assert "trials done" in progress and "best" in progress and "left" in progress
    answer = first["recommendation"]
    assert answer["provenance"] == "measured"
    assert answer["config"]["method"] == "full"  # the most faithful that fits
    assert answer["headroom_bytes"] == 2 * 1024**3 - answer["measurement"]["device_bytes"]
    points = [p for p in first["frontier"]["points"] if p["config"]["method"] == "full"]
    assert answer["config"] in [p["config"] for p in points]
    assert answer["measurement"]["tokens_per_second"] == max(p["measurement"]["tokens_per_second"] for p in points)
    again, _ = run(folder, "--memory-limit", "2GiB", "--max-trials", "6")
    assert again["trials"] == 0
    assert again["recommendation"]["config"] == answer["config"]
    assert again["frontier"]["points"] == first["frontier"]["points"]
    stored = trials(folder)
    verified = [t for t in stored if t.config.to_json() == answer["config"]]
    assert len(verified) >= 2  # the winner was run again in a fresh process
    wait_until_gone(folder)


def test_out_of_memory_rules_out_and_the_search_ends_with_what_fits(folder: Path) -> None:
    """fp32 needs 16 bytes a parameter beside activations, bf16 half of that: the limit lies between."""
    limit = 200 * 1024**2
    answer, _ = run(folder, "--in-place", "--memory-limit", "200MiB", "--method", "full")
    assert answer["recommendation"]["config"]["precision"] == "bf16"
    assert answer["recommendation"]["measurement"]["device_bytes"] <= limit
    assert answer["recommendation"]["headroom_bytes"] >= 0
    assert answer["out_of_memory"] >= 1
    assert answer["ruled_out"] >= 1
    stored = trials(folder)
    assert {t.outcome.kind for t in stored} == {"fits", "out_of_memory"}
    # what ran out under this limit answers for a lower one, without a trial
    lower, _ = run(folder, "--in-place", "--memory-limit", "199MiB", "--method", "full", "--max-trials", "1")
    assert lower["answered_from_store"] >= answer["trials"] - 2


def test_nothing_fits_ends_with_3_and_says_what_came_closest(folder: Path) -> None:
    _, said = run(folder, "--in-place", "--memory-limit", "30MiB", "--method", "full", expect=3)
    assert "nothing" in said or "cannot fit" in said


@pytest.mark.timeout(600)
def test_killed_at_ten_random_moments_it_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFIT_TEST_FOLDER", str(folder))
    choose = random.Random(7)
    before: list[Any] = []
    for _ in range(10):
        process = subprocess.Popen(
            command(folder, "--in-place", "--memory-limit", "2GiB"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(choose.uniform(0.5, 9.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until_gone(folder)
        now = trials(folder)
        assert [t.to_json() for t in now[: len(before)]] == [t.to_json() for t in before]  # nothing is ever lost
        before = now
    answer, _ = run(folder, "--in-place", "--memory-limit", "2GiB")
    stored = trials(folder)
    counts: dict[str, int] = {}
    for trial in stored:
        counts[trial.config.key] = counts.get(trial.config.key, 0) + 1
    repeated = [key for key, count in counts.items() if count > 1]
    assert len(repeated) <= 6, "only winners are run again"  # three verifications a method at most
    latest = {t.config: t for t in stored if isinstance(t.outcome, Fits)}
    frontier = Frontier.of(
        [Point(config=c, measurement=t.outcome.measurement, trial_id=t.trial_id) for c, t in latest.items()],
        hardware=stored[0].hardware,
        workload=stored[0].workload,
        stack=stored[0].stack,
        trials=len(stored),
        out_of_memory=0,
    )
    assert [p["trial_id"] for p in answer["frontier"]["points"]] == [p.trial_id for p in frontier.points]
    again, _ = run(folder, "--in-place", "--memory-limit", "2GiB")
    assert again["trials"] == 0
    assert again["frontier"]["points"] == answer["frontier"]["points"]


def test_sigint_ends_with_130_and_keeps_what_was_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFIT_TEST_FOLDER", str(folder))
    process = subprocess.Popen(
        command(folder, "--in-place", "--memory-limit", "2GiB"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    until = time.monotonic() + 120
    while not trials(folder) and time.monotonic() < until:
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "goes on from there" in err
    assert trials(folder)
    wait_until_gone(folder)
    with Store.open(str(folder / "store.db")) as store:
        assert store.searches()[0].status == "interrupted"
