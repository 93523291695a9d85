"""Killed groups leave nothing behind: the benchmark in short, with real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "group_cleanup.py"


def test_nothing_is_left_by_killed_ranks_and_drivers() -> None:
    command = [sys.executable, str(SCRIPT), "--trials", "6", "--victims", "rank,rank,driver"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["of_them"] == {"rank": 2, "driver": 1}
    assert report["outcomes"]["fits"] == 3
    assert set(report["at_last"].values()) == {0}
