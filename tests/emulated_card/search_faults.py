"""Searches on emulated cards that meet faults: each must end with an answer or a clear error, and leave nothing behind.

    python -m tests.emulated_card.search_faults FILE [--searches 200] [--seed 0] [--home .venv/emulated-card]

`make emulated-card` builds what it runs on. Each search has a machine of one to four cards, a store of its own, and one
to three faults, drawn by the seed, which happen while it runs: memory that runs out, an error of the card (ECC, illegal
access, unspecified launch failure), a driver that hangs, a card that is lost, one that slows down, memory taken by
somebody else. Every result is written to the file as it ends, and is not run again. Prints what went wrong, and exits
with 1 if anything did. About 20 s each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.emulated_card.cards import Machine

CARDS = ("t4", "a10g", "rtx-4090", "h100-80g", "b200")
JOB = ("--model", "smollm2-135m", "--seq-len", "64", "--global-batch", "4")
LIMITS = ("--max-trials", "6", "--time-budget", "2m")
ANSWERED, REFUSED, NOTHING_FITS, LACKS = 0, 2, 3, 4
LONGEST_SECONDS = 300
"""A search that runs longer has failed to end: its budget is 120 s, and a trial of it may take as long again."""
GRACE_SECONDS = 10.0
"""What a search started may live so long after it: an estimate that nobody waits for ends first."""
GIB = 1024**3

FAULTS: dict[str, Callable[[Machine, int, random.Random], None]] = {
    "out of memory": lambda machine, card, draw: machine.fail_allocation(card, draw.randint(1, 2000)),
    "memory is there again": lambda machine, card, draw: machine.fail_allocation(card, 0),
    "ECC error": lambda machine, card, draw: machine.error(card, 214, draw.randint(0, 5000)),
    "illegal access": lambda machine, card, draw: machine.error(card, 700, draw.randint(0, 5000)),
    "launch failure": lambda machine, card, draw: machine.error(card, 719, draw.randint(0, 5000)),
    "hangs": lambda machine, card, draw: machine.hang(card),
    "lost": lambda machine, card, draw: machine.take_away(card),
    "throttled": lambda machine, card, draw: machine.throttle(card, reasons=0x40, clock_mhz=300),
    "memory taken": lambda machine, card, draw: machine.take_memory(card, draw.randint(1, 14) * GIB),
}


def searched(number: int, seed: int, home: Path) -> dict[str, Any]:
    """One search and its faults: what it said, and what it left behind."""
    draw = random.Random(f"{seed} {number}")
    kind, count = draw.choice(CARDS), draw.choice((1, 1, 2, 4))
    faults = sorted(
        (draw.uniform(0, 25), draw.choice(list(FAULTS)), draw.randrange(count)) for _ in range(draw.randint(1, 3))
    )
    devices = draw.choice((1, 2)) if count > 1 else 1
    words = [*JOB, *LIMITS, "--devices", str(devices), *(["--in-place"] if count == 1 and draw.random() < 0.5 else [])]
    said: dict[str, Any] = {"number": number, "cards": [kind] * count, "words": words[len(JOB) + len(LIMITS) :]}
    said["faults"] = [[round(at, 1), fault, card] for at, fault, card in faults]
    with tempfile.TemporaryDirectory() as folder, Machine(home, *[kind] * count) as machine:
        command = [sys.executable, "-m", "autofit", "search", *words, "--store", str(Path(folder) / "store.db")]
        environment = {**os.environ, **machine.environment, "TMPDIR": folder}
        began = time.monotonic()
        with (Path(folder) / "out").open("w+") as out, (Path(folder) / "err").open("w+") as err:
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=err)
            for at, fault, card in faults:
                with_patience(process, began + at - time.monotonic())
                FAULTS[fault](machine, card, draw)
            ended = with_patience(process, began + LONGEST_SECONDS - time.monotonic())
            said["seconds"] = round(time.monotonic() - began, 1)
            if not ended:
                process.kill()
            process.wait()
            err.seek(0)
            lines = err.read().strip().splitlines()
        said |= {"exit_code": process.returncode if ended else None, "last": lines[-1][:300] if lines else ""}
        said["traceback"] = any("Traceback" in line for line in lines)
        patience = time.monotonic() + GRACE_SECONDS
        while (left := living(f"TMPDIR={folder}")) and time.monotonic() < patience:
            time.sleep(0.2)
        said["left"] = left
        said["held"] = [machine.held_bytes(card) for card in range(count)]
    return said


def with_patience(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait so long at most; returns whether it has ended."""
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return False
    return True


def living(mark: str) -> list[str]:
    """The processes whose environment holds `mark`, by their commands."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and mark.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100])
        except OSError:
            continue
    return found


def wrong(said: dict[str, Any]) -> str | None:
    """What is wrong with a search, in a few words; None if nothing is."""
    if said["exit_code"] is None:
        return "did not end"
    if said["exit_code"] not in (ANSWERED, REFUSED, NOTHING_FITS, LACKS):
        return f"exit code {said['exit_code']}"
    if said["traceback"]:
        return "a traceback"
    if said["exit_code"] != ANSWERED and not said["last"].startswith("autofit: "):
        return "no clear error"
    if said["left"]:
        return "left processes"
    return "left memory" if any(said["held"]) else None


def main() -> int:
    """Run what the file lacks, then judge all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--searches", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--home", type=Path, default=Path(".venv/emulated-card"))
    asked = parser.parse_args()
    done = [json.loads(line) for line in asked.file.read_text().splitlines()] if asked.file.exists() else []
    for number in sorted(set(range(asked.searches)) - {said["number"] for said in done}):
        done.append(searched(number, asked.seed, asked.home.absolute()))
        with asked.file.open("a") as out:
            out.write(json.dumps(done[-1], separators=(",", ":")) + "\n")
        print(f"{number + 1} of {asked.searches}: {wrong(done[-1]) or 'sound'}", file=sys.stderr, flush=True)
    print(f"{len(done)} searches, by exit code: {dict(Counter(said['exit_code'] for said in done))}")
    found = [(said, problem) for said in done if (problem := wrong(said)) is not None]
    for said, problem in found:
        print(f"{said['number']}: {problem}: {json.dumps(said)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
