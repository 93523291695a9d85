"""The `make search` job by this revision and by an earlier one, in turn, so that a machine that drifts favours neither.

    python benchmarks/before_after.py REVISION [--rounds 2] [--out FILE]

Prints one JSON document with, for each run, its revision, seconds (whole process), trials and recommended config, and
writes it to FILE after every run. Each begins with an empty store and runs in this environment, whose libraries the
earlier revision must be able to use. Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
JOB = ["search", "--model", "smollm2-135m", "--seq-len", "128", "--global-batch", "4", "--memory-limit", "2GiB"]


def git(*arguments: str) -> str:
    """What git prints."""
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def run(source: Path, revision: str) -> dict[str, Any]:
    """One search by the code in `source`, as a user runs it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "autofit.cli.main", *JOB, "--json", "--store", f"{folder}/store.db"]
        started = time.monotonic()
        done = subprocess.run(
            command, cwd=source, env={**os.environ, "PYTHONPATH": str(source)}, stdout=subprocess.PIPE, check=True
        )
        seconds = time.monotonic() - started
    answer = json.loads(done.stdout)
    best = answer["recommendation"]
    return {
        "revision": revision,
        "seconds": round(seconds, 1),
        "trials": answer["trials"],
        "out_of_memory": answer["out_of_memory"],
        "config": best["config"],
        "tokens_per_second": round(best["measurement"]["tokens_per_second"], 1),
        "hardware": best["hardware"]["name"],
        "stack": best["stack"],
    }


def in_turn(earlier: str, rounds: int, begun: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The document after each run: `begun`, and the runs so far. A round is one of this revision, then one of the
    earlier one."""
    runs: list[dict[str, Any]] = []
    present = git("rev-parse", "--short", "HEAD")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "earlier"
        git("worktree", "add", "--detach", str(source), earlier)
        try:
            for _ in range(rounds):
                for code, revision in ((ROOT, present), (source, earlier)):
                    runs.append(run(code, revision))
                    yield {**begun, "runs": runs}
        finally:
            git("worktree", "remove", "--force", str(source))


def main() -> None:
    """Run the searches and print the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    begun = {"recorded_at": datetime.now(UTC).isoformat(timespec="seconds")}
    text = ""
    for document in in_turn(arguments.revision, arguments.rounds, begun):
        text = json.dumps(document, indent=1)
        if arguments.out is not None:
            arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
