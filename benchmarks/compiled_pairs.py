"""How far trials of compiled configs are from their predictions, which assume that compilation changes nothing, except
that on a CPU the compiler's own memory counts.

    python benchmarks/compiled_pairs.py TABLE [--json FILE]

TABLE is a file of `autofit bench record` over compiled_pairs.yaml, or any other with configs that differ in `compile`
alone. Nothing is run. For each such pair that trained, prints measured over predicted device memory, with and without
compilation; the same of a step's time, predicted after the other trials without compilation; and the time with
compilation over the time without it, both measured. Then the range of each over all pairs, and the sentence that the
assumption on compilation (autofit/estimate/assumptions.py) may state. About a second per config.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cpu_rows import latest, read
from estimate_trials import Row, compared

from autofit.outcome import Trial


def pairs_of(trials: Iterable[Trial]) -> list[tuple[Trial, Trial]]:
    """The trials of configs that differ in `compile` alone, the one without compilation first."""
    known = {trial.config: trial for trial in trials}
    return [
        (known[plain], trial)
        for config, trial in known.items()
        if config["compile"] is True and (plain := config.replace(compile=False)) in known
    ]


def ratios(plain: Row, compiled: Row) -> dict[str, Any]:
    """One pair that trained: measured over predicted, and with compilation over without."""
    before, after = plain.measured, compiled.measured
    assert before is not None and after is not None, "both trained"
    said = [row.calibrated.step_seconds for row in (plain, compiled)]
    return {
        "config": plain.trial.config.to_json(),
        "memory_without": before.device_bytes / plain.guessed.device_bytes,
        "memory": after.device_bytes / compiled.guessed.device_bytes,
        "time_without": None if said[0] is None else before.step_seconds.median / said[0],
        "time": None if said[1] is None else after.step_seconds.median / said[1],
        "time_over_time_without": after.step_seconds.median / before.step_seconds.median,
        "setup_seconds": after.setup_seconds,
    }


def ranges(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Least, median and most of each ratio over all pairs."""
    found = {}
    for name in ("memory_without", "memory", "time_without", "time", "time_over_time_without"):
        known = [row[name] for row in rows if row[name] is not None]
        if known:
            found[name] = {"least": min(known), "median": statistics.median(known), "most": max(known)}
    return found


def stated(document: dict[str, Any]) -> str:
    """What the assumption may say of the pairs."""
    memory, time = document["ranges"]["memory"], document["ranges"]["time_over_time_without"]
    device = "a processor" if document["hardware"]["kind"] == "cpu" else "a GPU"
    return (
        f"of {len(document['pairs'])} configs trained on {device} with compilation, "
        f"memory was {memory['least']:.2f} to {memory['most']:.2f} times the predicted, and a step took "
        f"{time['least']:.2f} to {time['most']:.2f} times as long as without it"
    )


def document_of(trials: Sequence[Trial]) -> dict[str, Any]:
    """The pairs of one workload as a JSON object."""
    first = trials[0]
    rows = {row.trial.config: row for row in compared(trials)}
    pairs = [(rows[before.config], rows[after.config]) for before, after in pairs_of(trials)]
    found = [ratios(*pair) for pair in pairs if all(row.measured is not None for row in pair)]
    return {
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: getattr(first, name).to_json() for name in ("hardware", "stack", "workload")},
        "not_trained": len(pairs) - len(found),
        "ranges": ranges(found),
        "pairs": found,
    }


def text(row: dict[str, Any]) -> str:
    """One pair on one line."""
    config = ",".join(f"{axis}={value}" for axis, value in row["config"].items() if axis != "compile")
    times = ["    -" if row[name] is None else f"{row[name]:5.2f}" for name in ("time_without", "time")]
    return (
        f"memory {row['memory_without']:5.2f} {row['memory']:5.2f}   time {times[0]} {times[1]}   "
        f"with over without {row['time_over_time_without']:5.2f}, set up in {row['setup_seconds']:4.0f} s   {config}"
    )


def main() -> None:
    """Compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, metavar="TABLE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    groups = [group for group in latest(read(asked.table)) if pairs_of(group)]
    if len(groups) != 1:
        parser.error(f"{asked.table} has pairs of {len(groups)} workloads: it must be of one")
    document = document_of(groups[0])
    if not document["pairs"]:
        parser.error(f"no pair in {asked.table} trained")
    print("measured over predicted, without and with compilation")
    print("\n".join(map(text, document["pairs"])))
    print(json.dumps(document["ranges"], indent=2))
    print(stated(document))
    if asked.json:
        asked.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
