"""Every claim about what cannot be faster, against the times of the recorded tables and of pairs measured again."""

from __future__ import annotations

import importlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from unit.operations.made_trials import fits, make_trial, out_of_memory

from autofit.outcome import Outcome, Trial
from autofit.workers.pool import Completed

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
RECORD = BENCHMARKS / "recorded" / "cpu-zen5-2c-time-order.json"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("time_order")


def test_what_is_claimed_to_be_slower_was_measured_to_be(script: ModuleType) -> None:
    """Every claim in the median over the tables; and where two trials of a table contradict one beyond their intervals,
    which happens to few, in the median of rounds in which the two followed one another."""
    leads: dict[tuple[str, str], list[float]] = defaultdict(list)
    found = script.recorded_pairs((BENCHMARKS / "recorded").glob("*.jsonl"))
    for pair in found:
        leads[pair.claim].append(pair.lead)
    often = {claim: some for claim, some in leads.items() if len(some) >= 10}
    assert len(often) >= 4 and all(statistics.median(some) < 0 for some in often.values()), often
    contradicted = [pair for pair in found if pair.lead > 0]
    assert len(found) > 300 and len(contradicted) <= 0.05 * len(found)
    rows = json.loads(RECORD.read_text("utf-8"))["pairs"]
    for pair in contradicted:
        again = [row for row in rows if pair.is_of(row)]
        assert again, f"run benchmarks/time_order.py --json {RECORD.name}: {pair.slower.config} of {pair.table}"
        assert all(len(row["step_seconds"]) >= 3 and script.times_as_long(row) > 1 for row in again), again


PLAIN, FULL = ({"micro_batch": 2, "checkpointing": value} for value in ("none", "full"))


@pytest.fixture
def call(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the script over a table of the given speeds; answers with the exit status and what was asked, in order."""

    def run(recorded: dict[str, float], again: dict[str, Outcome], *arguments: str) -> tuple[int, list[str]]:
        asked: list[Any] = []
        trials: list[Trial] = [
            make_trial(config, fits(10, recorded[config["checkpointing"]])) for config in (PLAIN, FULL)
        ]
        monkeypatch.setattr(script, "is_table", lambda file: True)
        monkeypatch.setattr(script, "read_whole", lambda file: SimpleNamespace(name="made", trials=trials))
        pool = SimpleNamespace(
            site=lambda: (trials[0].hardware, trials[0].stack),
            submit=asked.append,
            wait=lambda timeout: [
                Completed(request=asked[-1], outcome=again[asked[-1].config.text("checkpointing")], seconds=3.0)
            ],
            close=lambda: None,
        )
        monkeypatch.setattr(script, "InPlacePool", lambda device: pool)
        monkeypatch.setattr("sys.argv", ["time_order.py", "made.jsonl", *arguments])
        return script.main(), [request.config.text("checkpointing") for request in asked]

    return run


def test_a_contradicting_pair_is_measured_in_turn_and_once(
    call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "order.json"
    kept = ("--json", str(document))
    recorded, again = {"none": 400.0, "full": 800.0}, {"none": fits(10, 512), "full": fits(10, 256)}
    assert call(recorded, again, *kept) == (0, ["none", "full", "full", "none", "none", "full"])
    assert "made: full over none 2.00 times as long (0.51 as recorded on h100-80g)" in capsys.readouterr().out
    (row,) = json.loads(document.read_text("utf-8"))["pairs"]
    assert row["step_seconds"] == [[pytest.approx(row["step_seconds"][0][0]), 2 * row["step_seconds"][0][0]]] * 3
    assert call(recorded, again, *kept) == (0, []), "a further call goes on"


def test_a_claim_that_is_contradicted_again_fails(call: Any) -> None:
    recorded = {"none": 400.0, "full": 800.0}
    assert call(recorded, {"none": fits(10, 256), "full": fits(10, 512)}, "--rounds", "1") == (1, ["none", "full"])
    assert call(recorded, {"none": fits(10, 256), "full": out_of_memory()}, "--rounds", "1")[0] == 1, "nothing shown"


def test_a_table_without_contradiction_asks_for_no_trial(call: Any) -> None:
    assert call({"none": 800.0, "full": 400.0}, {}) == (0, [])


def test_a_pair_of_which_one_did_not_fit_is_no_ratio(script: ModuleType) -> None:
    assert math.isnan(script.times_as_long({"step_seconds": [[1.0, None], [None, 2.0]]}))
    assert script.times_as_long({"step_seconds": [[1.0, None], [1.0, 2.0], [1.0, 3.0]]}) == 2.5


def test_a_file_of_another_machine_is_refused(call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "order.json"
    text = json.dumps({"hardware": {"name": "another"}, "stack": {}, "pairs": []})
    document.write_text(text, encoding="utf-8")
    assert call({"none": 400.0, "full": 800.0}, {}, "--json", str(document)) == (4, [])
    assert "measured on another" in capsys.readouterr().err and document.read_text("utf-8") == text
