"""The results are of the files beside them: figures of the recorded tables, and the tables of a page of its figures."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import estimate_emulated
import pytest
import replay

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RECORDED = BENCHMARKS / "recorded"


def figures(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RECORDED / name).read_text())
    return content


def test_figures_are_of_the_tables_as_they_are() -> None:
    tables = figures("replay-results.json")["tables"]
    assert tables == {file.stem: sha256(file.read_bytes()).hexdigest() for file in replay.TABLES}, (
        "a table has changed since: run `make results`"
    )


def test_the_page_is_of_its_figures() -> None:
    _, mark, written = (BENCHMARKS / "RESULTS.md").read_text().partition(replay.MARK)
    assert mark and written == f"\n{replay.tables_of(figures('replay-results.json'))}"


def test_the_made_devices_in_the_readme_are_their_record() -> None:
    record = figures("made-devices.json")["all"]
    within = record["searches"] - record["greedy"]
    text = " ".join((BENCHMARKS / "README.md").read_text().split())
    for sentence in (
        f"{record['searches']:,} searches, of every problem on every made device",
        f"| slower by, median | 2 % | {100 * record['regret']['median']:.0f} % |",
        f"| slower by, 90th percentile | 10 % | {100 * record['regret']['p90']:.1f} % |",
        f"({record['bounds_held']:,} of {record['bounds']:,}; ",
        f"60 s in {within:,} searches; **more** in {record['greedy']}, up to {record['longest_seconds']:.0f} s",
    ):
        assert sentence in text


@pytest.mark.parametrize("file", sorted(RECORDED.glob("*/figures.json")), ids=lambda file: file.parent.name)
def test_the_emulated_cards_in_the_readme_are_their_record(file: Path) -> None:
    assert estimate_emulated.table_of(json.loads(file.read_text())) in (BENCHMARKS / "README.md").read_text()


@pytest.mark.parametrize("file", ["killed-searches.jsonl", "killed-searches-real.jsonl"])
def test_the_killed_searches_in_the_docs_are_their_record(file: str) -> None:
    lines = (RECORDED / file).read_text().splitlines()
    killed = [search for search in map(json.loads, lines) if search["killed_after"] is not None]
    sound = [
        search for search in killed if search["state"] == "succeeded" and not search["wrong"] and not search["left"]
    ]
    text = (BENCHMARKS.parent / "docs" / "internals" / "searches.md").read_text()
    assert f"{len(sound)} of {len(killed)} searches in which one part was killed were sound" in text
