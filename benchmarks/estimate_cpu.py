"""The estimator against recorded CPU trials: memory, and time after calibration on a few of them.

    python benchmarks/estimate_cpu.py [TABLE ...] [--store URL] [--calibrate-on 5] [--seeds 20] [--json FILE]

A TABLE is a file of `autofit bench record` or `autofit db export`; without one and without --store, every such file in
recorded/ of a processor with two cores (cpu-2c, cpu-zen5-2c). The latest full measurement of each config counts or, of
a table that was recorded in several passes, the mean of these; nothing is run.
Prints the predicted and the measured figures of every config, with its time calibrated on all trials but its own. Then,
for each workload of each table:

* memory: the median absolute error, and how often fit is misjudged: over all pairs of a config and a limit halfway
  between two neighbouring measured sizes, and over all trials at the limit that they ran under, out-of-memory trials
  included; the same errors with the shares of estimate/heap.py fitted to the other tables alone (leave one table out),
  so that no trial judges a figure that was fitted to it;
* the errors of memory and of tokens/s (calibrated on all others) by kind of config: compiled, with offload, and others;
* time, on the trials not used for calibration: Kendall's tau-a of tokens/s, and the median absolute error. The
  calibration trials are drawn at random, once per seed 0, 1, ...; compiled ones are never drawn. The median over the
  seeds is printed with the worst. Beside it are the tau of predictions that are each calibrated on all other configs
  but the compiled ones, and the tau that a second measurement of the same configs would have: each speed is drawn anew
  within its trial's interval, which no prediction can beat except by luck. A trial does not see what the machine did
  between trials, so there is more noise than that. Of a table in several passes, `between_passes` has the tau of one
  against another, and how far their sizes differ; `left_unexplained` is the standard deviation of the errors that
  remain when every value of every axis, and every pair of values, is given its own correction with hindsight, and the
  tau of predictions without any other error. The costs of operations show up in such corrections; what they leave is
  noise, or interactions of three or more axes.

Each table of at least 60 configs is then held to the targets (cpu_targets.py), which are printed beside what was
reached, with what they leave open: how near the trials came to their limit. Last come the
memory errors over all tables together, and the heap's shares fitted to all of them. Exits with 0 only if every such
table reaches every target. The predictions are of the same step as the trials only if these ran on the present versions
of the libraries. About half a second per config on one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cpu_figures import between_passes, by_kind, heap, judged, kendall, listed, memory_errors
from cpu_rows import compared, latest, read
from cpu_targets import LEAST_CONFIGS, Target, beside_the_targets, held_to_targets, nearest_to_the_limit

from autofit.estimate.heap import SHARES
from autofit.store import Store

RECORDED = sorted((Path(__file__).parent / "recorded").glob("cpu-*2c-*.jsonl"))


def text(found: dict[str, Any]) -> str:
    """One config on one line."""
    memory, speed = found["device_bytes"], found["tokens_per_second"]
    config = ",".join(f"{k}={v}" for k, v in found["config"].items() if k not in ("offload", "sharding"))
    return (
        f"{memory['measured'] / 2**20:7.0f} {memory['predicted'] / 2**20:7.0f} MiB "
        f"{memory['predicted'] / memory['measured'] - 1:+6.1%}   {speed['measured']:7.1f} {speed['predicted']:7.1f} "
        f"tokens/s {speed['predicted'] / speed['measured'] - 1:+6.1%}   {config}"
    )


def table_text(configs: Sequence[dict[str, Any]], figures: dict[str, Any], targets: Sequence[Target]) -> str:
    """The configs of `listed`, the figures of merit, and these beside their targets."""
    against = "\n".join(map(str, targets)) or f"not judged: fewer than {LEAST_CONFIGS} configs"
    return "\n".join([*map(text, configs), json.dumps(figures, indent=2), *beside_the_targets(figures), against])


def main() -> int:
    """Print the figures of every workload that has enough configs to calibrate and compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", type=Path, metavar="TABLE")
    parser.add_argument("--store")
    parser.add_argument("--calibrate-on", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    files = {table.name: table for table in asked.tables or ([] if asked.store else RECORDED)}
    tables = {name: read(file) for name, file in files.items()}
    if asked.store:
        with Store.open(asked.store, create=False) as store:
            tables[asked.store] = list(store.stream())
    least = asked.calibrate_on + 2
    groups = [
        (name, group)
        for name, trials in tables.items()
        for group in latest(trials)
        if group[0].hardware.kind == "cpu" and len(group) > least
    ]
    found = [(name, group[0], *compared(group)) for name, group in groups]
    documents, shown = [], []
    missed = 0
    for (name, first, rows, wrong), (_, group) in zip(found, groups, strict=True):
        if len(rows) <= least:
            continue
        others = [row for other, _, known, _ in found if other != name for row in known]
        figures = judged(rows, others, asked.calibrate_on, asked.seeds)
        figures["memory"]["fit_misjudged_at_the_limit"] = wrong
        figures["memory"]["nearest_to_the_limit"] = nearest_to_the_limit(group)
        figures["between_passes"] = between_passes(files[name]) if name in files else None
        configs = listed(rows)
        shown += configs
        figures["errors_by_kind"] = by_kind(configs)
        figures["time"]["kendall_tau_calibrated_on_the_others"] = kendall(
            *([c["tokens_per_second"][of] for c in configs] for of in ("predicted", "measured"))
        )
        targets = held_to_targets(figures)
        print(f"{name}: {first.workload.model} on {first.hardware.name}: measured, predicted, error")
        print(table_text(configs, figures, targets))
        missed += sum(not target.reached for target in targets)
        about = {part: getattr(first, part).to_json() for part in ("hardware", "stack", "workload")}
        documents.append({"table": name, **about, **figures, "targets": [asdict(target) for target in targets]})
    if not documents:
        parser.error(f"no workload has more than {least} configs that were measured on a CPU")
    every = [row for _, _, rows, _ in found for row in rows]
    together = {
        "configs": len(every),
        "memory": memory_errors(every, SHARES),
        "errors_by_kind": by_kind(shown),
        "heap_fitted_to_all": [float(share) for share in heap(every)],
    }
    print(f"all tables: {json.dumps(together)}")
    if asked.json:
        document = {"recorded_at": datetime.now(UTC).isoformat(), "all_tables": together, "tables": documents}
        asked.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
