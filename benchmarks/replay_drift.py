"""Whether our search keeps its word on a machine that drifts: replays with more noise than trials know of.

    python benchmarks/replay_drift.py [--table FILE ...] [--between 0,0.04,0.07] [--seeds 20] [--store URL] [--out FILE]

A trial's interval says how well its process knew its own speed, and that is what a replay draws from. Here each draw
is also multiplied by the exponential of a normal variable of mean 0 and standard deviation `--between`, of which the
search is told nothing: what executions of one config differ by (benchmarks/trial_noise.py measured 0.04 to 0.07 on
two cores). For each problem and deviation, over the seeds: in how many searches the stated regret bound held, and how
much slower than the best what they recommended was. Prints a table for README.md; `--out` writes the figures, with the
revision that they are of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from replay_document import parser, replay
from replay_words import percents, table

from autofit.search.replay import ours
from autofit.search.replay.oracle import Enough, Oracle
from autofit.search.replay.recorded import Recorded
from autofit.search.replay.score import score
from autofit.search.replay.trace import Trace


def searched(recorded: Recorded, seed: int, between: float) -> Trace:
    """One search on a machine whose executions differ by `between`."""
    oracle = Oracle(recorded, seed, between=between)
    try:
        ours.search(recorded.problem, oracle, seed)
    except Enough:
        return oracle.trace(stopped=False)
    return oracle.trace(stopped=True)


def figures(recorded: Recorded, seeds: int, between: float) -> dict[str, Any]:
    """What the searches that ended by themselves show, as `autofit bench replay --json` has it."""
    ended = score(recorded, [searched(recorded, seed, between) for seed in range(seeds)]).ended
    return {"between": between, "ended": None if ended is None else asdict(ended)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay everything asked for, and print the table."""
    options = parser(__doc__)
    options.add_argument("--between", default="0,0.04,0.07")
    asked = options.parse_args(arguments)
    deviations = [float(text) for text in asked.between.split(",")]
    replay(asked, lambda recorded: [figures(recorded, asked.seeds, between) for between in deviations], table_of)


def table_of(document: Mapping[str, Any]) -> str:
    """In how many searches the bound held, and how much slower what they recommended was, as a table in Markdown."""
    deviations = [f"{one['between']:.0%}" for one in document["problems"][0]["figures"]]
    title = (
        "problem",
        *(f"{what}, {deviation}" for what in ("bound held", "slower by") for deviation in deviations),
    )
    ended = {
        problem["name"]: [
            one["ended"] if one["ended"] and one["ended"]["stated"] else None for one in problem["figures"]
        ]
        for problem in document["problems"]
    }
    rows = [
        (name, *(_held([e]) for e in found), *("-" if e is None else percents(e["recommended"]) for e in found))
        for name, found in ended.items()
    ]
    every = (_held([found[place] for found in ended.values()]) for place in range(len(deviations)))
    return table(title, [*rows, ("all", *every, *("" for _ in deviations))])


def _held(ended: Sequence[Mapping[str, Any] | None]) -> str:
    """In how many of the searches that stated a bound it held."""
    known = [e for e in ended if e is not None]
    return f"{sum(e['within_stated'] for e in known)} of {sum(e['seeds'] for e in known)}" if known else "-"


if __name__ == "__main__":
    main()
