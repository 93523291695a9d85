"""Killed groups leave nothing behind: the benchmark in short, with real processes."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "group_cleanup.py"


def test_nothing_is_left_by_killed_ranks_and_drivers() -> None:
    command = [sys.executable, str(SCRIPT), "--trials", "6", "--victims", "rank,rank,driver"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["of_them"] == {"rank": 2, "driver": 1}
    assert report["outcomes"]["fits"] == 3
    assert set(report["at_last"].values()) == {0}
    assert sum(report["outcomes"].values()) == 6


KILLED = {"outcome": "crashed", "reason": "rank 1: the trial was killed", "seconds": 1.0}
FITS = {"outcome": "fits", "reason": "", "seconds": 1.0}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The report of four trials, half with a victim, that end as they are told to; nothing is left by any."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    script = importlib.import_module("group_cleanup")
    alive = SimpleNamespace(process=SimpleNamespace(poll=lambda: None), close=lambda: None)
    monkeypatch.setattr(script, "Driver", lambda ranks: alive)
    for name in ("left_behind", "settled"):
        monkeypatch.setattr(script, name, lambda *asked: {"processes": []})

    def count(*ends: tuple[Any, bool], victim: str = "rank") -> dict[str, Any]:
        left = iter(ends)
        monkeypatch.setattr(script, "one_trial", lambda *asked: next(left))
        report: dict[str, Any] = script.run(4, 2, [victim], random.Random(0), tmp_path)
        assert next(left, None) is None
        return report

    return count


def test_a_trial_that_had_just_ended_is_counted_apart(counted: Any) -> None:
    untouched = (FITS, False)
    report = counted(untouched, (FITS, True), (KILLED, True), untouched, (FITS, False), (KILLED, True))
    assert (report["killed"], report["of_them"], report["had_just_ended"]) == (2, {"rank": 2}, {"rank": 2})
    assert report["outcomes"] == {"fits": 2, "crashed: rank 1: the trial was killed": 2}


def test_a_killed_driver_answers_nothing(counted: Any) -> None:
    report = counted((FITS, False), (None, True), (FITS, False), (None, True), victim="driver")
    assert (report["of_them"], report["outcomes"]) == ({"driver": 2}, {"fits": 2, "driver killed": 2})


def test_a_trial_that_fails_though_nobody_killed_it_ends_the_count(counted: Any) -> None:
    for ends in ([(KILLED, False)], [(FITS, False), (KILLED, False)]):
        with pytest.raises(SystemExit, match="died without being killed"):
            counted(*ends)
