"""Our search and Optuna's samplers on devices that do not exist: recorded tables, with some configs slower or heavier.

    python benchmarks/replay_devices.py [--table FILE ...] [--method M ...] [--device NAME ...] [--sample N --seed S]
                                        [--seeds 1] [--search NAME ...] [--ablate LAYER ...]
                                        [--budget 600] [--jobs N] [--store URL] [--keep FILE] [--out FILE]
    python benchmarks/replay_devices.py --only CASE [--search NAME] [--budget 600] [--store URL]

The search is told the predictions of the honest device. For each made device and over all, the worst first: how much
slower than that device's best the recommended config is (median and 90th percentile), in how many searches the stated
bound on that holds, the median seconds of trials to within 5 % of the best beside Optuna's, and the longest trial. Our
search has the command's time budget, used up by the seconds of trials (`--budget 0` for none).

Without `--device`, a problem is searched on every device of `autofit.bench.catalogue`; `--sample` draws so many cases.
Every search is appended to `--keep` as it ends, and is not run again by the same code. `--only` repeats one case, named
as in the last column, and prints its trials. `--ablate` runs our search instead with and without a layer of its
statistics (`autofit.bench.ablation`), on these devices and on the tables as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from replay_document import JUDGED
from replay_results import code_here
from replay_words import percent, table

from autofit.bench.ablation import LAYERS
from autofit.bench.cases import Case, Row, run_lacking
from autofit.bench.catalogue import devices
from autofit.bench.made_device import RECORDED as AS_RECORDED
from autofit.bench.made_device import MadeDevice
from autofit.bench.made_search import BUDGET_SECONDS, OURS, searched
from autofit.bench.summary import Summary, by_device, least_bounds_held, summary
from autofit.operations.replay_at_once import problems_of
from autofit.operations.replay_problems import RECORDED, Tables
from autofit.outcome import Fits
from autofit.search.replay.rivals_optuna import RIVALS
from autofit.search.replay.score import Spread
from autofit.trial.site import cores

QUICK = tuple(name for name in RIVALS if not name.startswith("optuna-gp"))
"""Optuna's samplers that run if none is named: its Gaussian process computes for minutes."""
SHOWN = 25
"""Devices in the printed table."""


def main() -> None:
    """Run what is asked for and lacking, and print the table."""
    asked = options()
    files = tuple(asked.table or (RECORDED / f"{name}.jsonl" for name in JUDGED))
    tables = Tables(files=files, store=asked.store)
    if asked.only:
        show(tables, asked)
        return
    rows = run_lacking(
        tables,
        cases_of(tables, asked),
        budget=asked.budget,
        jobs=asked.jobs,
        keep=asked.keep,
        report=lambda said: print(said, file=sys.stderr, flush=True),
    )
    figures = ablated(rows, asked.ablate) if asked.ablate else compared(rows)
    document = {
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "code": code_here(),
        "budget": asked.budget,
        **figures,
    }
    if asked.out:
        asked.out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="append", type=Path, metavar="FILE")
    parser.add_argument("--method", action="append", choices=("full", "lora", "qlora", "any"))
    parser.add_argument("--device", action="append", type=MadeDevice.of, metavar="NAME")
    parser.add_argument("--sample", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--search", action="append", choices=(OURS, *RIVALS))
    parser.add_argument("--ablate", action="append", choices=(*LAYERS, "all"))
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, metavar="SECONDS")
    parser.add_argument("--jobs", type=int, default=cores())
    parser.add_argument("--store")
    parser.add_argument("--keep", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--only", metavar="CASE")
    asked = parser.parse_args()
    if asked.ablate and "all" in asked.ablate:
        asked.ablate = list(LAYERS)
    return asked


def cases_of(tables: Tables, asked: argparse.Namespace) -> list[Case]:
    """The searches asked for. Every method gets the same sample of cases, and so does every layer."""
    problems = [p for p in problems_of(tables).values() if not asked.method or p.problem.method in asked.method]
    for recorded in problems:
        recorded.problem.foresee()  # once here, so that not every worker does it: the store keeps the estimates

    def on(recorded: Any, made: Iterable[MadeDevice]) -> list[Case]:
        seeds = range(asked.seeds)
        return [Case(problem=recorded.problem.name, device=str(d), seed=seed) for d in made for seed in seeds]

    drawn = [case for recorded in problems for case in on(recorded, asked.device or devices(recorded))]
    if asked.sample is not None:
        drawn = random.Random(asked.seed).sample(drawn, min(asked.sample, len(drawn)))
    if asked.ablate:
        drawn += [case for recorded in problems for case in on(recorded, [MadeDevice()])]
        return [replace(c, layer=name, present=p) for name in asked.ablate for p in (True, False) for c in drawn]
    return [replace(case, search=search) for search in asked.search or (OURS, *QUICK) for case in drawn]


def compared(rows: Sequence[Row]) -> dict[str, Any]:
    """Print ours beside Optuna's, and return the figures."""
    if not any(row["search"] == OURS for row in rows):
        return {"rows": rows}
    every, found = summary("all", rows), by_device(rows)
    title = (
        "device",
        "searches",
        "slower by",
        "bound held",
        "s to 5 %",
        "others",
        "longest, s",
        "failed",
        "worst case",
    )
    print(table(title, [_line(one) for one in (every, *found[:SHOWN])]))
    least = least_bounds_held(found)
    worst = "too few searches of each" if least is None else percent(least)
    print(f"{len(found)} devices; bound held on the worst: {worst}; our seconds to 5 % over others': {every.over}")
    return {"all": every.to_json(), "least_bound_held": least, "devices": [one.to_json() for one in found]}


def _line(one: Summary) -> tuple[str, ...]:
    spreads = one.seconds_to_near_of.values()
    other = _figure(min(spreads, key=lambda spread: spread.median or math.inf)) if spreads else "-"
    own, held = _figure(one.seconds_to_near), f"{one.bounds_held} of {one.bounds}"
    longest = f"{one.longest_seconds:.0f} ({one.greedy} over 60)"
    return one.name, str(one.searches), _percents(one.regret), held, own, other, longest, str(one.failed), one.worst


def ablated(rows: Sequence[Row], layers: Sequence[str]) -> dict[str, Any]:
    """Print the search with each layer beside the search without it, and return the figures."""
    found: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for present in (True, False):
            for recorded in (True, False):
                name = f"{'with' if present else 'without'} {layer}, {'tables' if recorded else 'made devices'}"
                own = [row for row in rows if (row["layer"], row["present"]) == (layer, present)]
                some = [row for row in own if (row["device"] == AS_RECORDED) is recorded]
                if some:
                    found.setdefault(layer, {})[name] = summary(name, some)
    title = ("search", "searches", "slower by", "bound held", "trials to 1 %", "s to 1 %", "trials", "s", "frontier")
    every = [one for own in found.values() for one in own.values()]
    print(table((*title, "computing, s", "failed"), [_ablated_line(one) for one in every]))
    return {"layers": {layer: {name: one.to_json() for name, one in own.items()} for layer, own in found.items()}}


def _ablated_line(one: Summary) -> tuple[str, ...]:
    held, to_best = f"{one.bounds_held} of {one.bounds}", (_figure(one.trials_to_best), _figure(one.seconds_to_best))
    ended = f"{one.trials:.2f}", f"{one.seconds:.1f}", f"{one.frontier:.3f}", f"{one.computing_seconds:.3f}"
    return one.name, str(one.searches), _percents(one.regret), held, *to_best, *ended, str(one.failed)


def _percents(spread: Spread) -> str:
    return f"{percent(spread.median)} / {percent(spread.p90)}"


def _figure(spread: Spread) -> str:
    return " / ".join("never" if figure is None else f"{figure:.0f}" for figure in (spread.median, spread.p90))


def show(tables: Tables, asked: argparse.Namespace) -> None:
    """Run one case, and print its trials."""
    *problem, device, seed = asked.only.split("/")
    recorded = problems_of(tables)["/".join(problem)]
    for search in asked.search or (OURS,):
        found = searched(recorded, MadeDevice.of(device), search, int(seed), asked.budget or None)
        for run in found.trace.runs:
            speed = run.outcome.measurement.tokens_per_second if isinstance(run.outcome, Fits) else 0.0
            print(f"{run.seconds:7.1f} s  {run.outcome.kind:14} {speed:7.1f} tokens/s  {run.config}")
        for best in found.bests:
            print(f"the best: {best.measurement.tokens_per_second:.1f} tokens/s  {best.config}")
        print(f"{search} recommends {found.trace.stated and found.trace.stated.config}")
        print(json.dumps(found.figures(), indent=1))


if __name__ == "__main__":
    main()
