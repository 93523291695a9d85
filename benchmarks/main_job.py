"""The `make search` job, timed: first run, second run from the store, and the same under a tighter limit; the first and
the last also without predictions.

    python benchmarks/main_job.py [--out FILE] [--trials FILE]

Takes about a quarter of an hour on 2 cores. Prints one JSON document: when it began, and for each run its seconds
(whole process), trials, outcomes and recommendation, with hardware and stack. `--trials` exports the trials of the
first run. Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

JOB = ["--model", "smollm2-135m", "--seq-len", "128", "--global-batch", "4"]
UNPREDICTED = "--no-predict"
"""Shows what predictions are worth, by comparison."""
EVERYTHING = (UNPREDICTED, "--thorough", "--max-trials", "20")
"""A search that runs into what predictions would have ruled out."""


def run(store: Path, limit: str, *more: str) -> dict[str, Any]:
    """One search as a user runs it; seconds are those of the whole process."""
    command = [sys.executable, "-m", "autofit.cli.main", "search", *JOB, "--memory-limit", limit, *more, "--json"]
    started = time.monotonic()
    done = subprocess.run([*command, "--store", str(store)], stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.monotonic() - started
    answer = json.loads(done.stdout)
    recommended = answer["recommendation"]
    return {
        "memory_limit": limit,
        "more": list(more),
        "seconds": round(seconds, 1),
        "trials": answer["trials"],
        "out_of_memory": answer["out_of_memory"],
        "ruled_out": answer["ruled_out"],
        "answered_from_store": answer["answered_from_store"],
        "stopped_because": answer["stopped_because"],
        "config": recommended["config"],
        "tokens_per_second": round(recommended["measurement"]["tokens_per_second"], 1),
        "device_bytes": recommended["measurement"]["device_bytes"],
        "hardware": answer["frontier"]["hardware"]["name"],
        "stack": answer["frontier"]["stack"],
    }


def main() -> None:
    """Run the five searches in fresh stores and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trials", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store.db"
        runs = {
            "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "first": run(store, "2GiB"),
            "second": run(store, "2GiB"),
            "tight": run(Path(folder) / "tight.db", "1GiB"),
            "first_without_predictions": run(Path(folder) / "unpredicted.db", "2GiB", UNPREDICTED),
            "tight_without_predictions": run(Path(folder) / "tight-unpredicted.db", "1GiB", *EVERYTHING),
        }
        if arguments.trials:
            export = ["db", "export", str(arguments.trials), "--store", str(store)]
            subprocess.run([sys.executable, "-m", "autofit.cli.main", *export], check=True)
    text = json.dumps(runs, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
