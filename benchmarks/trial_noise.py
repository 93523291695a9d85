"""One config, ten trials: how far repeats agree, and what a trial's machinery costs.

    python benchmarks/trial_noise.py [--repeats 10] [--config axis=value,...] [--out FILE]

Prints the median throughput of the first five trials against that of the other five and of the worst split of all
into two fives, the spread each trial stored of itself and in how many trials that interval (half to either side) holds
the median of all, and the overhead (from the request to the first forward,
building the model apart) of all trials but the first. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path

import torch

from autofit.operations import WorkloadOptions
from autofit.outcome import Fits
from autofit.techniques import complete, parse
from autofit.trial.request import TrialRequest
from autofit.trial.runner import TrialRunner
from autofit.trial.site import detect

GIB = 1024**3


def worst_split(values: list[float]) -> float:
    """The largest relative difference between the medians of one half and of the other."""
    worst = 0.0
    for chosen in combinations(range(len(values)), len(values) // 2):
        a = statistics.median(values[i] for i in chosen)
        b = statistics.median(v for i, v in enumerate(values) if i not in chosen)
        worst = max(worst, abs(a - b) / min(a, b))
    return worst


def covering(speeds: list[float], spreads: list[float]) -> float:
    """Share of the trials whose stored interval holds the median of all: 0.9 if the stored spread is honest."""
    middle = statistics.median(speeds)
    return statistics.mean(abs(s - middle) <= s * spread / 2 for s, spread in zip(speeds, spreads, strict=True))


def machine_noise() -> float:
    """(p95 - p5) / median of the time that the same matrix products take here, thirty times over.

    No trial can repeat better than its machine does.
    """
    a = torch.ones(1024, 1024)
    seconds = []
    for _ in range(31):
        started = time.perf_counter()
        for _ in range(64):
            a @ a
        seconds.append(time.perf_counter() - started)
    ordered = sorted(seconds[1:])
    return (ordered[28] - ordered[1]) / statistics.median(ordered)


def main() -> None:
    """Measure one config again and again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--config", default="method=full,precision=bf16,micro_batch=4")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    job = WorkloadOptions(model="smollm2-135m", seq_len=128, global_batch=4).job(detect())
    request = TrialRequest(job=job, config=complete(parse(arguments.config)), memory_limit_bytes=4 * GIB)
    speeds, spreads, overheads, memory = [], [], [], []
    with TrialRunner(kind=job.hardware.kind) as runner:
        for _ in range(arguments.repeats):
            outcome, _ = runner.run(request)
            assert isinstance(outcome, Fits), outcome
            measured = outcome.measurement
            speeds.append(measured.tokens_per_second)
            spreads.append(measured.step_seconds.relative_spread or 0.0)
            overheads.append(measured.overhead_seconds)
            memory.append(measured.device_bytes)
    half = len(speeds) // 2
    first, other = statistics.median(speeds[:half]), statistics.median(speeds[half:])
    report = {
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": job.hardware.name,
        "stack": job.stack.to_json(),
        "config": arguments.config,
        "tokens_per_second": [round(s, 1) for s in speeds],
        "first_half_against_second": abs(first - other) / min(first, other),
        "worst_split": worst_split(speeds),
        "stored_spread_median": statistics.median(spreads),
        "stored_intervals_that_hold_the_median": covering(speeds, spreads),
        "spread_across_trials": (max(speeds) - min(speeds)) / statistics.median(speeds),
        "machine_noise": machine_noise(),
        "device_bytes_spread": (max(memory) - min(memory)) / statistics.median(memory),
        "overhead_seconds_first": overheads[0],
        "overhead_seconds_median_after_first": statistics.median(overheads[1:]),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
