"""Every claim about what cannot be faster, against the times of the recorded tables and of pairs measured again."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from autofit.core.outcome import Fits, StepSeconds, Trial
from autofit.operations.recording.table_file import RecordedTable, is_table, read_table
from autofit.techniques import only_slower

RECORDED = Path(__file__).parents[3] / "benchmarks" / "recorded"


def pairs(table: RecordedTable) -> Iterator[tuple[Trial, Trial]]:
    """Every two configs that the table measured of which the second is claimed to be slower."""
    known = {trial.config: trial for trial in table.trials if isinstance(trial.outcome, Fits)}
    for config, trial in known.items():
        for slower in only_slower(config):
            if slower in known:
                yield trial, known[slower]


def claim(faster: Trial, slower: Trial) -> tuple[str, str]:
    return faster.config.text("checkpointing"), slower.config.text("checkpointing")


def timing(trial: Trial) -> StepSeconds:
    assert isinstance(trial.outcome, Fits)
    return trial.outcome.measurement.step_seconds


def lead(faster: Trial, slower: Trial) -> float:
    """By how much the one that should be slower was faster, beyond the wider of their intervals; logarithm."""
    one, other = timing(faster), timing(slower)
    spread = max(one.relative_spread or 0.0, other.relative_spread or 0.0)
    return math.log(one.median / other.median) - spread / 2


def test_what_is_claimed_to_be_slower_was_measured_to_be() -> None:
    """Every claim in the median over the tables; and where two trials of a table contradict one beyond their intervals,
    which happens to few, in the median of three rounds or more in which the two followed one another."""
    tables = [read_table(file, whole=True) for file in sorted(RECORDED.glob("*.jsonl")) if is_table(file)]
    result = [(table.name, *pair) for table in tables for pair in pairs(table)]
    leads: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _, *pair in result:
        leads[claim(*pair)].append(lead(*pair))
    often = {name: some for name, some in leads.items() if len(some) >= 10}
    assert len(often) >= 4 and all(statistics.median(some) < 0 for some in often.values()), often
    contradicted = [(table, faster, slower) for table, faster, slower in result if lead(faster, slower) > 0]
    assert len(result) > 300 and len(contradicted) <= 0.05 * len(result)
    rows = json.loads((RECORDED / "cpu-zen5-2c-time-order.json").read_text("utf-8"))["pairs"]
    for table, faster, slower in contradicted:
        key = (table, slower.config.to_json(), [*claim(faster, slower)])
        again = [row["step_seconds"] for row in rows if (row["table"], row["slower"], row["claim"]) == key]
        assert again, f"measure {slower.config} of {table} again, in turn with {faster.config}"
        for rounds in again:
            assert len(rounds) >= 3
            assert statistics.median(late / early for early, late in rounds if early and late) > 1
