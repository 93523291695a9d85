"""The page of results is of the files beside it: its figures of the recorded tables, and its words of its figures."""

from __future__ import annotations

import importlib
import json
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RECORDED = BENCHMARKS / "recorded"


def figures(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / name).read_text())
    return found


@pytest.mark.parametrize("name", ["replay-results.json", "replay-gp.json", "replay-gp-later.json"])
def test_figures_are_of_the_tables_as_they_are(name: str) -> None:
    tables = figures(name)["tables"]
    assert tables
    for table, said in tables.items():
        digest = sha256((RECORDED / f"{table}.jsonl").read_bytes()).hexdigest()
        assert digest == said["sha256"], f"{table} has changed since {name} was made: run `make results`"


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("replay_results")


def test_the_rows_of_the_page_are_its_figures(results: ModuleType) -> None:
    """What is written around them may be of an earlier revision."""
    rows = [line for line in results.page(figures("replay-results.json")).splitlines() if line.startswith("| ")]
    page = set((BENCHMARKS / "RESULTS.md").read_text().splitlines())
    assert rows and not [row for row in rows if row not in page]


def test_the_made_devices_in_the_readme_are_their_record() -> None:
    found = figures("made-devices.json")["all"]
    within = found["searches"] - found["greedy"]
    text = (BENCHMARKS / "README.md").read_text()
    for said in (
        f"{found['searches']:,} searches, of every problem on every made device",
        f"| slower by, median | 2 % | {100 * found['regret']['median']:.0f} % |",
        f"| slower by, 90th percentile | 10 % | {100 * found['regret']['p90']:.1f} % |",
        f"({found['bounds_held']:,} of {found['bounds']:,}; ",
        f"60 s in {within:,} searches; **more** in {found['greedy']}, up to {found['longest_seconds']:.0f} s",
    ):
        assert said in text


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        ("replay-workers", "replay_workers", "nothing measured before; medians of {} seeds."),
        ("replay-limits", "replay_limits", "so nobody chose them; {} seeds."),
        ("replay-drift", "replay_drift", "that has not yet run any config twice; {} seeds,"),
    ],
)
def test_a_table_in_the_readme_is_its_record(results: ModuleType, name: str, module: str, words: str) -> None:
    """The figures of one worker and of four, those under many limits, and those of a machine that drifts."""
    document = figures(f"{name}.json")
    assert {table: results.header_of(RECORDED / f"{table}.jsonl")["sha256"] for table in document["tables"]} == (
        document["tables"]
    ), "a table has changed since: run `make results`"
    results_of = figures("replay-results.json")
    judged = {problem["table"] for problem in results_of["problems"]}
    assert set(document["tables"]) == judged, "the Makefile and replay_document.py name other tables"
    assert document["code"]["search"] == results_of["code"]["search"], (
        "RESULTS.md is of another search: run `make results`, which makes all"
    )
    table = importlib.import_module(module).table_of(document)
    assert words.format(document["seeds"]) in (text := (BENCHMARKS / "README.md").read_text())
    assert table in text, f"the record says:\n{table}"
