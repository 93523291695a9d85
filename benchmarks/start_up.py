"""How long commands that train nothing take: `autofit --help`, and `recommend` from a store of 100,000 trials.

    python benchmarks/start_up.py [--trials 100000] [--runs 7] [--out FILE]

Prints the median and maximum seconds of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from autofit.operations import WorkloadOptions
from autofit.outcome import Fits, Measurement, OutOfMemory, StepSeconds, Trial
from autofit.store import Store
from autofit.techniques import complete
from autofit.trial.site import detect

GIB = 1024**3


def synthetic(count: int) -> Iterator[Trial]:
    """Trials with made-up speed and memory, each of a different config: only their number matters here."""
    draw = random.Random(0)
    job = WorkloadOptions(model="smollm2-135m", seq_len=128, global_batch=4).job(detect())
    base = Trial(
        config=complete({}),
        workload=job.workload,
        hardware=job.hardware,
        stack=job.stack,
        memory_limit_bytes=job.hardware.memory_bytes,
        outcome=OutOfMemory(reason="synthetic"),
        seconds=1.0,
        recorded_at="2026-01-01T00:00:00+00:00",
    )
    for number in range(count):
        method = draw.choice(("full", "lora", "qlora"))
        values: dict[str, object] = {"method": method, "precision": draw.choice(("bf16", "bf16-mixed", "fp32"))}
        if method != "full":
            values["rank"] = 8
        config = complete({**values, "micro_batch": number + 1})
        yield replace(base, config=config, outcome=measured(draw) if draw.random() < 0.8 else base.outcome)


def measured(draw: random.Random) -> Fits:
    """A measurement between 1 and 16 GiB."""
    memory = draw.randrange(GIB, 16 * GIB)
    speed = 1000.0 * draw.betavariate(2, 2) * memory / (16 * GIB)
    return Fits(
        measurement=Measurement(
            tokens_per_second=speed,
            step_seconds=StepSeconds(median=1.0, p95=1.1, relative_spread=0.1),
            mfu=None,
            peak_allocated_bytes=memory,
            peak_reserved_bytes=memory,
            device_bytes=memory,
            host_peak_bytes=memory,
            host_baseline_bytes=GIB // 4,
            phase_peaks={"forward": memory, "backward": memory, "optimizer": memory},
            losses=(10.0, 9.0, 8.0),
            reference_loss=10.0,
            steps=3,
            setup_seconds=1.0,
            overhead_seconds=0.1,
        )
    )


def timed(command: list[str], runs: int) -> dict[str, float]:
    """Seconds of the whole process, after one run that warms the disk cache and leaves compiled modules behind."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    seconds = []
    for _ in range(runs + 1):
        started = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        seconds.append(time.monotonic() - started)
    return {"median": round(statistics.median(seconds[1:]), 3), "max": round(max(seconds[1:]), 3)}


def main() -> None:
    """Fill a store and time the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    program = [sys.executable, "-m", "autofit.cli.main"]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store.db"
        with Store.open(str(store)) as opened:
            opened.add_new(synthetic(arguments.trials))
        job = ["--model", "smollm2-135m", "--seq-len", "128", "--global-batch", "4", "--store", str(store)]
        hardware, stack = detect()
        report = {
            "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "hardware": hardware.name,
            "stack": stack.to_json(),
            "trials": arguments.trials,
            "help_seconds": timed([*program, "--help"], arguments.runs),
            "recommend_seconds": timed([*program, "recommend", *job, "--format", "json"], arguments.runs),
        }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
