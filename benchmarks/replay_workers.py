"""What several workers gain: our search replayed over recorded tables with one trial at a time, and with several.

    python benchmarks/replay_workers.py [--table FILE ...] [--workers 1,4] [--seeds 20] [--store URL] [--out FILE]

For each problem (one training method of a table, or all side by side) and number of workers, over the seeds: the trials
that had begun when the first trial within 1% of the best ended, the time at which it ended, and the trials and the time
until the search stopped by itself. Trials take as long as recorded, whatever else runs: workers with devices of their
own. Prints a table for README.md; `--out` writes the figures, with the revision that they are of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from replay_document import parser, replay
from replay_verdicts import NEVER, figure
from replay_words import count, span, table

from autofit.outcome import OutOfMemory
from autofit.search.replay.oracle import CLOSE, Enough, Oracle
from autofit.search.replay.ours import ReplayPool, job_of, search_on
from autofit.search.replay.recorded import Recorded, share_of_speed
from autofit.search.replay.score import Spread


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
    """Replay everything asked for, and print the table."""
    options = parser(__doc__)
    options.add_argument("--workers", default="1,4")
    asked = options.parse_args(arguments)
    numbers = [int(number) for number in asked.workers.split(",")]
    replay(
        asked,
        lambda recorded: [figures(recorded, asked.seeds, number) for number in numbers],
        table_of,
        workers=numbers,
    )


def table_of(document: Mapping[str, Any]) -> str:
    """The medians as a table in Markdown."""
    workers = [count(number, "worker") for number in document["workers"]]
    title = ("problem", *(f"{what}, {n}" for what in ("to 1 %", "until it stops") for n in workers))
    rows = [
        (
            problem["name"],
            *(_cost(one["trials"], one["seconds"]) for one in problem["figures"]),
            *(_cost(one["all_trials"], one["all_seconds"]) for one in problem["figures"]),
        )
        for problem in document["problems"]
    ]
    return table(title, rows)


def _cost(trials: Mapping[str, float | None], seconds: Mapping[str, float | None]) -> str:
    if trials["median"] is None:
        return NEVER
    return f"{span([trials['median']], 'trial')}, {figure(seconds['median'])} s"


if __name__ == "__main__":
    main()
