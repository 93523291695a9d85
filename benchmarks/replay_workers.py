"""What several workers gain: our search replayed over recorded tables with one trial at a time, and with several.

    python benchmarks/replay_workers.py [--table FILE ...] [--workers 1,4] [--seeds 20] [--store URL] [--json FILE]

For each problem (one training method of a table, or all side by side) and number of workers, over the seeds: the trials
that had begun when the first trial within 1% of the best ended, the time at which it ended, and the trials and the time
until the search stopped by itself. Trials take as long as recorded, whatever else runs: workers with devices of their
own.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autofit.operations.replay_problems import RECORDED, Tables
from autofit.operations.replaying import SEEDS
from autofit.outcome import OutOfMemory
from autofit.search.replay.oracle import CLOSE, Enough, Oracle
from autofit.search.replay.ours import ReplayPool, job_of, search_on
from autofit.search.replay.recorded import Recorded, share_of_speed
from autofit.search.replay.score import Spread

JUDGED = ("cpu-2c-smollm2-135m", "cpu-2c-pythia-160m", "cpu-zen5-2c-smollm2-135m")
"""The tables that are replayed if none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """One search. Times are in seconds since its first trial began."""

    trials: float
    """Begun when the first trial within 1% of the best ended; infinite if none came so close."""
    seconds: float
    """When that one ended."""
    all_trials: int
    all_seconds: float
    """When the last one ended."""
    out_of_memory: int


def searched(recorded: Recorded, seed: int, workers: int) -> Searched:
    """One search with so many workers."""
    oracle = Oracle(recorded, seed)
    pool = ReplayPool(job_of(recorded.problem), oracle, size=workers)
    try:
        search_on(pool, recorded.problem, seed)
        stopped = True
    except Enough:
        stopped = False
    runs = oracle.trace(stopped=stopped).runs
    best = recorded.best
    near = (
        end
        for run, (_, end) in zip(runs, pool.ran, strict=True)
        if share_of_speed(run.config, run.outcome, best) >= 1.0 - CLOSE
    )
    close = min(near, default=math.inf)
    return Searched(
        trials=sum(begun < close for begun, _ in pool.ran) if math.isfinite(close) else math.inf,
        seconds=close,
        all_trials=len(runs),
        all_seconds=max(end for _, end in pool.ran),
        out_of_memory=sum(isinstance(run.outcome, OutOfMemory) for run in runs),
    )


def figures(recorded: Recorded, seeds: int, workers: int) -> dict[str, Any]:
    """Medians and 90th percentiles over the seeds, by field of `Searched`."""
    found = [asdict(searched(recorded, seed, workers)) for seed in range(seeds)]
    return {name: asdict(Spread.of([one[name] for one in found])) for name in found[0]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line per problem and number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="append", default=[], type=Path, metavar="FILE")
    parser.add_argument("--workers", default="1,4")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--store")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args(arguments)
    tables = asked.table or [RECORDED / f"{name}.jsonl" for name in JUDGED]
    rows = []
    print(
        "median / 90th percentile | workers | trials to 1% | seconds to 1% | own stop, trials | seconds | out of memory"
    )
    for recorded in Tables(files=tuple(tables), store=asked.store).problems():
        if not recorded.points:
            continue
        for workers in map(int, asked.workers.split(",")):
            found = figures(recorded, asked.seeds, workers)
            rows.append({"problem": recorded.problem.name, "workers": workers, "seeds": asked.seeds, **found})
            print(f"{recorded.problem.name} | {workers} | {' | '.join(map(_said, found.values()))}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _said(spread: dict[str, float | None]) -> str:
    return " / ".join("never" if figure is None else f"{figure:.3g}" for figure in spread.values())


if __name__ == "__main__":
    main()
