"""How long a search takes to name its next config: with 2,000 candidates, and with 50,000.

    python benchmarks/asking_time.py [--asks 50] [--out FILE]

Prints the median and the worst of so many asks, in seconds. Each follows an outcome, so that what is known is weighed
anew, and begins with 200 results, a third of which ran out of memory; every config has a prediction. Outcomes and
predictions are made up: only how many there are matters here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from replay import code_here
from start_up import measured

from autofit.lattice import Config, Lattice
from autofit.operations import WorkloadOptions
from autofit.operations.lattices import load_space, narrow
from autofit.outcome import Fits, OutOfMemory, Prediction, StepSeconds, Trial, now
from autofit.search.advice import Advice
from autofit.search.adviser import Adviser
from autofit.search.foresight import Foresight
from autofit.search.knowledge import Knowledge
from autofit.techniques import AXES, Job
from autofit.trial.site import detect
from autofit.workload import Goal

CANDIDATES = (2_000, 50_000)
RESULTS = 200
FITTING = 0.67
"""Share of the configs that fit."""
MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeSearch:
    """A search over many configs, with results."""

    adviser: Adviser
    knowledge: Knowledge
    job: Job
    sizes: Mapping[Config, int]
    """Device bytes of each config; they rise along the memory order."""
    draw: random.Random

    def tell(self, config: Config) -> None:
        """Tell the outcome of a config, of which the memory decides whether it fits."""
        limit, speed = self.knowledge.memory_limit_bytes, self.draw.uniform(200, 400)
        steps = StepSeconds(median=self.job.workload.tokens_per_step / speed, p95=3.0, relative_spread=0.03)
        fits = replace(measured(self.draw).measurement, device_bytes=self.sizes[config], step_seconds=steps)
        outcome = Fits(measurement=replace(fits, tokens_per_second=speed))
        trial = Trial(
            config=config,
            workload=self.job.workload,
            hardware=self.job.hardware,
            stack=self.job.stack,
            memory_limit_bytes=limit,
            outcome=outcome if self.sizes[config] <= limit else OutOfMemory(reason="made up"),
            seconds=8.0,
            recorded_at=now(),
        )
        self.adviser.tell(trial)

    def seconds_of_asks(self, asks: int) -> list[float]:
        """Seconds that each of so many asks took."""
        taken = []
        for _ in range(asks):
            began = time.perf_counter()
            config = self.adviser.ask()
            taken.append(time.perf_counter() - began)
            self.tell(config)
        return taken


def made_search(candidates: int) -> MadeSearch:
    """A search with 200 results and so many candidates."""
    draw = random.Random(1)
    job = WorkloadOptions(model="smollm2-135m", seq_len=128, global_batch=4).job(detect())
    configs = tuple(itertools.islice(dict.fromkeys(many_configs(job)), 3 * candidates // 2))
    sizes = {config: int(512 * MIB * math.exp(0.1 * rank_in_order(config))) for config in configs}
    limit = sorted(sizes.values())[int(FITTING * len(sizes))]
    knowledge = Knowledge(Lattice(axes=AXES, configs=configs), limit)
    advice = Advice(knowledge, lambda config: 256 * MIB)
    advice.foresee(
        Foresight(
            predictions={
                config: Prediction(
                    peak_allocated_bytes=1,
                    device_bytes=int(size * draw.uniform(0.95, 1.05)),
                    step_seconds=draw.uniform(0.5, 2.0) / size**0.1,
                    calibrated_on=0,
                    relative_error=0.5,
                )
                for config, size in sizes.items()
            }
        )
    )
    made = MadeSearch(adviser=Adviser(knowledge, advice), knowledge=knowledge, job=job, sizes=sizes, draw=draw)
    for config in draw.sample(configs, RESULTS):
        made.tell(config)
    for config in knowledge.open[candidates:]:
        knowledge.rule_out(config, "that many are enough")
    if len(knowledge.open) != candidates:
        raise ValueError(f"{len(knowledge.open)} configs are open, not {candidates}: the space has too few")
    return made


def many_configs(job: Job) -> Iterator[Config]:
    """The configs of the space `cpu`, with more values on some axes than it has."""
    lattice = narrow(load_space("cpu"), Goal(), job).lattice
    for rank in range(1, 100):
        for config in lattice.configs:
            for flag, kernel, loss in itertools.product(
                (False, True), ("sdpa", "flash", "eager"), ("fused", "chunked", "full")
            ):
                yield config.replace(rank=rank, compile=flag, attention=kernel, loss=loss)


def rank_in_order(config: Config) -> float:
    """A number that rises along the memory order."""
    return sum(
        math.log2(config.number(axis.name)) if axis.numeric else axis.values.index(config[axis.name])
        for axis in AXES
        if axis.name in config
    )


def report_of(candidates: int, asks: int) -> dict[str, Any]:
    """Median and worst."""
    taken = made_search(candidates).seconds_of_asks(asks)
    return {
        "candidates": candidates,
        "results": RESULTS,
        "asks": asks,
        "median_seconds": round(statistics.median(taken), 4),
        "worst_seconds": round(max(taken), 4),
    }


def main() -> None:
    """Time the asks and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--asks", type=int, default=50)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    hardware, stack = detect()
    report = {
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware.name,
        "stack": stack.to_json(),
        "code": code_here(),
        "asking": [report_of(candidates, arguments.asks) for candidates in CANDIDATES],
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
