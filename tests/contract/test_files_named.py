"""Files that commands are given by default are there."""

from __future__ import annotations

import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def test_the_tables_that_make_results_replays_are_recorded() -> None:
    done = subprocess.run(["make", "--dry-run", "results"], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    (command,) = (line for line in done.stdout.splitlines() if "replay_results.py" in line)
    files = {word.split("@")[0] for word in command.split() if word.startswith("benchmarks/recorded/")}
    assert len(files) >= 3
    assert [file for file in files if not (CHECKOUT / file).is_file()] == []
    assert "25%" in {word.split("@")[1] for word in command.split() if "@" in word}
