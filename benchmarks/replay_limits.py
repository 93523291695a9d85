"""Our search under many memory limits: replays of every table under limits between its lightest config and its own.

    python benchmarks/replay_limits.py [--table FILE ...] [--limits 12] [--seeds 20] [--without LAYER]
                                       [--store URL] [--out FILE]

The limits of a problem divide the range from the memory of its lightest config to the table's limit into equal parts,
so nobody chose them. Near what the fastest configs need, a few per cent of error in predicted memory decide which of
them are tried. For each problem: under how many of its limits the search had run a config within 1 % of the best after
at most 8 trials, in the median of the seeds; under how many at most one trial of the whole search ran out of memory; in
how many searches the stated regret bound held; and, in the median over the limits and at worst, how much
slower than the best what it recommended was, each a median of the seeds. `--without` takes a layer of the search's
statistics away (`autofit.bench.ablation`). Prints a table for README.md; `--out` writes the figures, with the revision
that they are of.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

from replay_document import parser, replay
from replay_verdicts import NEAR, OUT_OF_MEMORY, TRIALS
from replay_words import percent, table

from autofit.bench.ablation import LAYERS
from autofit.bench.made_device import MadeDevice
from autofit.outcome import Fits
from autofit.search.replay import ours
from autofit.search.replay.kept import searched
from autofit.search.replay.recorded import Recorded, under
from autofit.search.replay.score import score


def lowered(recorded: Recorded, count: int) -> list[Recorded]:
    """The problem under each of `count` limits, rising to its own; the lightest config fits under all."""
    most = recorded.problem.memory_limit_bytes
    least = min(p.measurement.device_bytes for p in recorded.points)
    limits = [least + round((most - least) * part / count) for part in range(1, count + 1)]
    return [
        Recorded(
            problem=replace(recorded.problem, memory_limit_bytes=limit),
            trials={
                config: replace(trial, outcome=under(limit, trial.outcome), memory_limit_bytes=limit)
                for config, trial in recorded.trials.items()
            },
        )
        for limit in limits
    ]


def figures(recorded: Recorded, seeds: int) -> dict[str, Any]:
    """What the searches under one limit show, as `autofit bench replay --json` has it."""
    found = score(recorded, [searched(recorded, ours.search, seed)[1] for seed in range(seeds)])
    return {
        "memory_limit_bytes": recorded.problem.memory_limit_bytes,
        "fitting": sum(isinstance(trial.outcome, Fits) for trial in recorded.trials.values()),
        "trials": next(asdict(reached.trials) for reached in found.reached if reached.within == NEAR),
        "out_of_memory": asdict(found.out_of_memory),
        "ended": None if found.ended is None else asdict(found.ended),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay everything asked for, and print the table."""
    options = parser(__doc__)
    options.add_argument("--limits", type=int, default=12)
    options.add_argument("--without", choices=[*LAYERS])
    asked = options.parse_args(arguments)
    as_recorded = MadeDevice()
    with LAYERS[asked.without].applied(as_recorded, present=False) if asked.without else nullcontext():
        replay(
            asked,
            lambda problem: [figures(one, asked.seeds) for one in lowered(problem, asked.limits)],
            table_of,
            without=asked.without,
        )


def table_of(document: Mapping[str, Any]) -> str:
    """A problem a row, and all together, as a table in Markdown."""
    title = (
        "problem",
        f"within 1 % after at most {TRIALS[0]} trials",
        f"at most {OUT_OF_MEMORY} out of memory",
        "bound held",
        "slower by, median",
        "slower by, at worst",
    )
    problems = {problem["name"]: problem["figures"] for problem in document["problems"]}
    every = [one for found in problems.values() for one in found]
    return table(title, [*((name, *_row(found)) for name, found in problems.items()), ("all", *_row(every))])


def _row(found: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    near = sum(one["trials"]["median"] is not None and one["trials"]["median"] <= TRIALS[0] for one in found)
    few = sum(
        max(said["out_of_memory"]["median"] for said in (one, one["ended"]) if said) <= OUT_OF_MEMORY for one in found
    )
    ended = [one["ended"] for one in found if one["ended"] and one["ended"]["stated"]]
    held = f"{sum(e['within_stated'] for e in ended)} of {sum(e['seeds'] for e in ended)}"
    # None where half of the seeds recommend another method than the best config's.
    slower = [math.inf if e["recommended"]["median"] is None else e["recommended"]["median"] for e in ended]
    ends = (statistics.median(slower), max(slower)) if slower else ()
    worst = [percent(None if math.isinf(share) else share) for share in ends] or ["-", "-"]
    return f"{near} of {len(found)} limits", f"{few} of {len(found)} limits", held, *worst


if __name__ == "__main__":
    main()
