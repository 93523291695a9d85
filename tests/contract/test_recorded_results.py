"""The page of results is of the files beside it: its figures of the recorded tables, and its words of its figures."""

from __future__ import annotations

import importlib
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RECORDED = BENCHMARKS / "recorded"


def figures(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / name).read_text())
    return found


@pytest.mark.parametrize("name", ["replay-results.json", "replay-gp.json"])
def test_figures_are_of_the_tables_as_they_are(name: str) -> None:
    tables = figures(name)["tables"]
    assert tables
    for table, said in tables.items():
        digest = sha256((RECORDED / f"{table}.jsonl").read_bytes()).hexdigest()
        assert digest == said["sha256"], f"{table} has changed since {name} was made: run `make results`"


def test_the_page_is_what_its_figures_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    page = importlib.import_module("replay_page").page(figures("replay-results.json"))
    same = page == (BENCHMARKS / "RESULTS.md").read_text()
    assert same, "run `python benchmarks/replay_results.py --from benchmarks/recorded/replay-results.json`"
