"""The estimator held to emulated cards: configs drawn anew, predicted, then trained as a user's are."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CARD = "a10g"
DRAWN = ("--cards", CARD, "--configs", "4", "--seed", "18", "--processes", "1")
"""Not the seed of what is recorded."""
MEDIAN_ALLOCATED, LARGEST_ALLOCATED, MEDIAN_RESERVED = 0.0005, 0.005, 0.005
"""The targets of benchmarks/README.md for figures that so few configs can show."""


def test_drawn_configs_take_what_is_predicted(home: Path, tmp_path: Path) -> None:
    """Memory to the byte, nearly; and what is predicted to fit does."""
    command = [sys.executable, str(ROOT / "benchmarks" / "estimate_emulated.py"), str(tmp_path), *DRAWN]
    done = subprocess.run([*command, "--home", str(home)], capture_output=True, text=True, timeout=1800)
    rows = [json.loads(line) for line in (tmp_path / f"{CARD}.jsonl").read_text().splitlines()[1:]]
    assert len(rows) >= 4, done.stderr
    assert {row["outcome"] for row in rows} <= {"fits", "out_of_memory"}, done.stdout
    assert all(row["predicted"]["fits"] == (row["outcome"] == "fits") for row in rows), done.stdout
    allocated, reserved = (errors(rows, f"peak_{size}_bytes") for size in ("allocated", "reserved"))
    assert statistics.median(allocated) <= MEDIAN_ALLOCATED and max(allocated) <= LARGEST_ALLOCATED, done.stdout
    assert statistics.median(reserved) <= MEDIAN_RESERVED, done.stdout


def errors(rows: list[dict[str, dict[str, int]]], size: str) -> list[float]:
    """How far off the prediction is, as a share, of each config that trained."""
    return [abs(row["predicted"][size] / row["measured"][size] - 1.0) for row in rows if row["measured"]]
