"""How far the times that a probe foretells are from those of a recorded table, before any trial.

    python benchmarks/probe_error.py TABLE ... [--probe FILE] [--json FILE]

A TABLE is a file of `autofit bench record`. Its own probe is used if its header has one; --probe gives one for all of
them (`autofit probe --json > FILE`), which must have been taken on a device of the same kind. Nothing is run: every
config that fitted in full is traced anew and timed at the probe's rates alone. Compiled configs are left out.

Prints for each table the median and the largest error, predicted over measured; Kendall's tau; the expected error that
predictions state; and, for every value of every axis, the median ratio of its configs over that of all.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpu_figures import kendall

from autofit.bench.tables import foresight_of
from autofit.core.device_probe import Probe
from autofit.operations.recorded_tables import RecordedTable, read_whole
from autofit.outcome import Fits

Pair = tuple[dict[str, Any], float, float]
"""A config's values, its predicted and its measured seconds of a step."""


def main() -> None:
    """Judge the tables that the command line names."""
    arguments = _parser().parse_args()
    given = Probe.from_json(json.loads(arguments.probe.read_text())) if arguments.probe else None
    tables = [read_whole(file) for file in arguments.tables]
    judged = [_judged(table if given is None else replace(table, probe=given)) for table in tables]
    for one in judged:
        _tell(one)
    if arguments.json:
        arguments.json.write_text(json.dumps(judged, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path, metavar="TABLE")
    parser.add_argument("--probe", type=Path, help="what `autofit probe --json` printed")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def _judged(table: RecordedTable) -> dict[str, Any]:
    foresight = foresight_of(table)
    pairs: list[Pair] = []
    stated = []
    for trial in table.trials:
        said = foresight.predictions.get(trial.config)
        if not isinstance(trial.outcome, Fits) or said is None or said.step_seconds is None:
            continue
        if trial.config.get("compile") is True or trial.outcome.measurement.stopped_early:
            continue
        stated.append(said.relative_error or 0.0)
        pairs.append((dict(trial.config.items), said.step_seconds, trial.outcome.measurement.step_seconds.median))
    if not pairs:
        raise SystemExit(f"{table.name}: nothing that fits was timed in full, so there is nothing to compare")
    errors = [abs(predicted / measured - 1.0) for _, predicted, measured in pairs]
    return {
        "table": table.name,
        "probed": table.probe is not None,
        "configs": len(pairs),
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "stated_error": statistics.median(stated),
        "tau": kendall([p for _, p, _ in pairs], [m for _, _, m in pairs]),
        "median_ratio": statistics.median(p / m for _, p, m in pairs),
        "by_value": _by_value(pairs),
    }


def _by_value(pairs: Sequence[Pair]) -> dict[str, float]:
    """The median ratio of the configs that have a value, predicted over measured."""
    found: dict[str, list[float]] = defaultdict(list)
    for config, predicted, measured in pairs:
        for axis, value in config.items():
            found[f"{axis}={value}"].append(predicted / measured)
    alone = {name.partition("=")[0] for name, ratios in found.items() if len(ratios) == len(pairs)}
    kept = {name: ratios for name, ratios in found.items() if name.partition("=")[0] not in alone}
    return {name: statistics.median(ratios) for name, ratios in sorted(kept.items())}


def _tell(judged: dict[str, Any]) -> None:
    probed = "" if judged["probed"] else " (no probe: guessed from the number of cores or the data sheet)"
    print(f"{judged['table']}: {judged['configs']} configs{probed}")
    print(
        f"  median error {judged['median_error']:.1%}, largest {judged['largest_error']:.0%}, "
        f"stated {judged['stated_error']:.0%}; tau {judged['tau']:.2f}"
    )
    print(f"  predicted over measured: {judged['median_ratio']:.2f}; by value:")
    for name, ratio in judged["by_value"].items():
        print(f"    {name:28s} {ratio:5.2f}")


if __name__ == "__main__":
    main()
