"""Recorded pairs that contradict the order in time, measured again in turn.

    python benchmarks/time_order.py [TABLE ...] [--rounds 3] [--json FILE]

The order in time claims of some configs that they cannot be faster than another (docs/internals/search-in-depth.md).
Machines whose speed changes within minutes measure the opposite now and then, since a table's trials run in shuffled
order: a trial that met a slow moment lies far from its neighbour that did not. Here the two trials of a pair follow one
another, and change places every round, so that a slow moment that lasts favours neither.

A pair of another machine's table is measured here, too, which shows what holds here alone. For each pair of the tables
(by default, all in `recorded/`) whose slower config was the faster one beyond the wider of
both intervals, trains both under the table's limit, `--rounds` times each. Prints each pair, and writes FILE after
each; a further call with the same FILE goes on. Some minutes; run nothing else meanwhile. Exits with 1 if a claim is
contradicted again, by the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from measured_again import measured

from autofit.errors import AutofitError, EnvironmentLacks
from autofit.operations.recorded_tables import RecordedTable, is_table, read_whole
from autofit.outcome import Fits, Measurement, Trial
from autofit.techniques import only_slower
from autofit.workers.in_place import InPlacePool
from autofit.workers.pool import Pool

RECORDED = Path(__file__).parent / "recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two measured configs of one table, the second of which is claimed to be slower."""

    table: str
    faster: Trial
    slower: Trial

    @property
    def claim(self) -> tuple[str, str]:
        """The values of the axis in which they differ, the faster first."""
        return self.faster.config.text("checkpointing"), self.slower.config.text("checkpointing")

    @property
    def lead(self) -> float:
        """By how much the one that should be slower was faster, beyond the wider of their intervals; logarithm."""
        timings = [_fits(trial).step_seconds for trial in (self.faster, self.slower)]
        spread = max(timing.relative_spread or 0.0 for timing in timings)
        return math.log(timings[0].median / timings[1].median) - spread / 2

    def is_of(self, row: dict[str, Any]) -> bool:
        """Whether the row of a document is this pair's."""
        return (
            row["table"] == self.table
            and row["slower"] == self.slower.config.to_json()
            and row["claim"] == [*self.claim]
        )


def _fits(trial: Trial) -> Measurement:
    assert isinstance(trial.outcome, Fits), "only what fits is paired"
    return trial.outcome.measurement


def pairs(table: RecordedTable) -> Iterator[Pair]:
    """Every claim of the order in time on two configs that the table measured."""
    known = {trial.config: trial for trial in table.trials if isinstance(trial.outcome, Fits)}
    for config, trial in known.items():
        for slower in only_slower(config):
            if slower in known:
                yield Pair(table=table.name, faster=trial, slower=known[slower])


def recorded_pairs(files: Iterable[Path]) -> list[Pair]:
    """All pairs of the tables among the files."""
    return [pair for file in sorted(files) if is_table(file) for pair in pairs(read_whole(file))]


def in_turn(pool: Pool, pair: Pair, rounds: int) -> dict[str, Any]:
    """The pair's row: seconds per step, [faster, slower] for each round, None where a trial did not fit."""
    steps = []
    for number in range(rounds):
        order = (pair.faster, pair.slower) if number % 2 == 0 else (pair.slower, pair.faster)
        found = {trial.config: seconds(measured(pool, trial, trial.memory_limit_bytes)) for trial in order}
        steps.append([found[pair.faster.config], found[pair.slower.config]])
    return {
        "table": pair.table,
        "slower": pair.slower.config.to_json(),
        "claim": [*pair.claim],
        "recorded_on": pair.slower.hardware.name,
        "recorded_lead": round(pair.lead, 4),
        "step_seconds": steps,
    }


def seconds(trial: Trial | None) -> float | None:
    """Median time of a step; None unless the trial fits."""
    return _fits(trial).step_seconds.median if trial is not None and isinstance(trial.outcome, Fits) else None


def times_as_long(row: dict[str, Any]) -> float:
    """How many times as long a step of the slower config takes as one of the other: the median over the rounds.
    NaN, of which no comparison is true, if no round measured both."""
    ratios = [slower / faster for faster, slower in row["step_seconds"] if faster is not None and slower is not None]
    return statistics.median(ratios) if ratios else math.nan


def text(row: dict[str, Any]) -> str:
    """One pair on one line."""
    config = ",".join(f"{axis}={value}" for axis, value in row["slower"].items() if axis != "checkpointing")
    faster, slower = row["claim"]
    return (
        f"{row['table']}: {slower} over {faster} {times_as_long(row):.2f} times as long "
        f"({math.exp(-row['recorded_lead']):.2f} as recorded on {row['recorded_on']})   {config}"
    )


def measured_further(known: dict[str, Any], left: Sequence[Pair], rounds: int) -> Iterator[dict[str, Any]]:
    """The document after each pair that is left. Raises `EnvironmentLacks` if its pairs were measured elsewhere."""
    if not left:
        return
    document = known
    pool = InPlacePool(device="cpu" if all(pair.slower.hardware.kind == "cpu" for pair in left) else "auto")
    try:
        site = dict(zip(("hardware", "stack"), (part.to_json() for part in pool.site()), strict=True))
        if any(document.get(part, here) != here for part, here in site.items()):
            raise EnvironmentLacks(
                f"the pairs so far were measured on {document['hardware']['name']} with {document['stack']}, and this "
                f"is {site['hardware']['name']} with {site['stack']}",
                remedy="write another file with --json",
            )
        for pair in left:
            row = in_turn(pool, pair, rounds)
            recorded_at = datetime.now(UTC).isoformat(timespec="seconds")
            document = {"recorded_at": recorded_at, **site, "pairs": [*document["pairs"], row]}
            yield document
    finally:
        pool.close()


def main() -> int:
    """Measure the pairs that are left, print all; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="*", metavar="TABLE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    known: dict[str, Any] = {"pairs": []}
    if asked.json and asked.json.exists():
        known = json.loads(asked.json.read_text("utf-8"))
    document = known
    try:
        contradicted = [pair for pair in recorded_pairs(asked.tables or RECORDED.glob("*.jsonl")) if pair.lead > 0]
        left = [pair for pair in contradicted if not any(map(pair.is_of, known["pairs"]))]
        for document in measured_further(known, left, asked.rounds):
            if asked.json:
                asked.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except AutofitError as error:
        print(f"time_order: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join(map(text, document["pairs"])))
    return 0 if all(times_as_long(row) > 1 for row in document["pairs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
