"""One config, ten trials: how well repeats agree, and what a trial's machinery costs.

    python benchmarks/trial_noise.py [--repeats 10] [--config axis=value,...] [--products-seconds 4] [--out FILE]

Prints how far the median throughput of the first five trials is from that of the other five, and the same for the worst
of all splits into two fives; the spread that each trial stored, and the share of trials whose interval (half the spread
to either side) contains the median of all; the same with the variation between executions added, as the nine other
trials show it; and the overhead (from the request to the first forward, without building the model) of the first trial
and the median of the others.

Before and after each trial, another process repeatedly times one matrix product of the kind that the step runs: how far
its own medians differ says whether the machine was quiet. A trial's speed relative to that of the products around it is
what it would be on a machine that does not drift. Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from itertools import combinations, pairwise
from multiprocessing import get_context
from pathlib import Path

import torch

from autofit.operations import WorkloadOptions
from autofit.outcome import Fits
from autofit.repeatability import between_executions, widened
from autofit.techniques import complete, parse
from autofit.trial.request import TrialRequest
from autofit.trial.runner import TrialRunner
from autofit.trial.site import detect

GIB = 1024**3


def worst_split(values: list[float]) -> float:
    """The largest relative difference between the medians of two halves, over all splits into halves."""
    worst = 0.0
    for chosen in combinations(range(len(values)), len(values) // 2):
        a = statistics.median(values[i] for i in chosen)
        b = statistics.median(v for i, v in enumerate(values) if i not in chosen)
        worst = max(worst, abs(a - b) / min(a, b))
    return worst


def covering(speeds: list[float], spreads: list[float]) -> float:
    """Share of the trials whose stored interval contains the median of all: 0.9 if the stored spread is honest."""
    middle = statistics.median(speeds)
    return statistics.mean(abs(s - middle) <= s * spread / 2 for s, spread in zip(speeds, spreads, strict=True))


def differences_of_the_others(speeds: list[float], spreads: list[float]) -> list[float]:
    """For each trial, the variation between executions as all the other trials show it."""
    executions = list(zip(speeds, spreads, strict=True))
    return [between_executions([executions[:i] + executions[i + 1 :]]) for i in range(len(executions))]


def spread_of(values: Sequence[float]) -> float:
    """(largest - smallest) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def products_a_second(seconds: float) -> float:
    """Median products per second, over `seconds`, of the largest matrix product in a layer of the measured step (bf16;
    512 tokens, smollm2-135m's hidden size of 576 and its MLP's 1,536), on all cores."""
    a, b = torch.ones(512, 576, dtype=torch.bfloat16), torch.ones(576, 1536, dtype=torch.bfloat16)
    rates, deadline = [], time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        started = time.perf_counter()
        for _ in range(8):
            a @ b
        rates.append(8 / (time.perf_counter() - started))
    return statistics.median(rates)


def machine_noise() -> float:
    """(p95 - p5) / median of the time that the same matrix products take here, over thirty repeats.

    No trial can be more repeatable than its machine.
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
    """Measure one config repeatedly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--config", default="method=full,precision=bf16,micro_batch=4")
    parser.add_argument("--products-seconds", type=float, default=4.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.repeats < 2:
        parser.error("--repeats must be at least 2")
    job = WorkloadOptions(model="smollm2-135m", seq_len=128, global_batch=4).job(detect())
    request = TrialRequest(job=job, config=complete(parse(arguments.config)), memory_limit_bytes=4 * GIB)
    speeds, spreads, overheads, memory = [], [], [], []
    # A process of its own: its threads sleep between two calls, and no trial is the child of a process with threads.
    beside = ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"))
    with beside, TrialRunner(kind=job.hardware.kind) as runner:
        products = [beside.submit(products_a_second, arguments.products_seconds).result()]
        for _ in range(arguments.repeats):
            outcome, _ = runner.run(request)
            assert isinstance(outcome, Fits), outcome
            measured = outcome.measurement
            speeds.append(measured.tokens_per_second)
            spreads.append(measured.step_seconds.relative_spread or 0.0)
            overheads.append(measured.overhead_seconds)
            memory.append(measured.device_bytes)
            products.append(beside.submit(products_a_second, arguments.products_seconds).result())
            print(f"{speeds[-1]:.1f} tokens/s, {products[-1]:.1f} products/s", file=sys.stderr)
    around = [(before + after) / 2 for before, after in pairwise(products)]
    between = differences_of_the_others(speeds, spreads)
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
        "executions_differ_by": between_executions([list(zip(speeds, spreads, strict=True))]),
        "intervals_with_that_of_the_others_that_hold_the_median": covering(
            speeds, [widened(spread, more) for spread, more in zip(spreads, between, strict=True)]
        ),
        "spread_across_trials": spread_of(speeds),
        "products_a_second": [round(rate, 1) for rate in products],
        "products_worst_split": worst_split(around),
        "products_spread": spread_of(products),
        "worst_split_relative_to_products": worst_split([s / p for s, p in zip(speeds, around, strict=True)]),
        "machine_noise": machine_noise(),
        "device_bytes_spread": spread_of(memory),
        "overhead_seconds_first": overheads[0],
        "overhead_seconds_median_after_first": statistics.median(overheads[1:]),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
