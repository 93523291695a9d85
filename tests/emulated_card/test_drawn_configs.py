"""The estimator held to emulated cards: configs drawn anew, predicted, then trained as a user's are."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CARD = "a10g"
SEED = 18
"""Not that of what is recorded."""
MEDIAN_ALLOCATED, LARGEST_ALLOCATED, MEDIAN_RESERVED = 0.0005, 0.005, 0.005
"""The targets of benchmarks/README.md for figures that so few configs can show."""


def drawn(home: Path, folder: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    """The rows of configs drawn, and what the program says of them."""
    command = [sys.executable, str(ROOT / "benchmarks" / "draw_emulated.py"), str(folder), "--home", str(home)]
    numbers = ["--cards", CARD, "--seed", str(SEED), "--processes", "1", *options]
    done = subprocess.run([*command, *numbers], capture_output=True, text=True, timeout=1800)
    rows = [json.loads(line) for line in (folder / f"{CARD}.jsonl").read_text().splitlines()[1:]]
    assert {row["outcome"] for row in rows} <= {"fits", "out_of_memory"}, done.stdout
    assert all(row["predicted"]["fits"] == (row["outcome"] == "fits") for row in rows), done.stdout
    return rows, f"{done.stdout}\n{done.stderr}"


def test_drawn_configs_take_what_is_predicted(home: Path, tmp_path: Path) -> None:
    """Memory to the byte, nearly; and what is predicted to fit does."""
    rows, said = drawn(home, tmp_path, "--configs", "4")
    assert len(rows) >= 4, said
    allocated, reserved = (errors(rows, f"peak_{size}_bytes") for size in ("allocated", "reserved"))
    assert statistics.median(allocated) <= MEDIAN_ALLOCATED and max(allocated) <= LARGEST_ALLOCATED, said
    assert statistics.median(reserved) <= MEDIAN_RESERVED, said


def test_compiled_configs_allocate_what_is_predicted(home: Path, tmp_path: Path) -> None:
    """What their first run reserves to tune its kernels is not predicted."""
    rows, said = drawn(home, tmp_path, "--configs", "2", "--compile")
    assert len(rows) >= 2 and all(row["config"]["compile"] for row in rows), said
    assert max(errors(rows, "peak_allocated_bytes")) <= LARGEST_ALLOCATED, said


def errors(rows: list[dict[str, Any]], size: str) -> list[float]:
    """How far off the prediction is, as a share, of each config that trained."""
    return [abs(row["predicted"][size] / row["measured"][size] - 1.0) for row in rows if row["measured"]]
