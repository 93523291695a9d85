"""The page of results is of the files beside it: its figures of the recorded tables, and its words of its figures."""

from __future__ import annotations

import importlib
import json
import re
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


def test_the_page_is_what_its_figures_say(results: ModuleType) -> None:
    """Whether the search's code was already another when the page was written is no matter: the page says so itself."""
    document = figures("replay-results.json")
    pages = [results.page(document, present=digest) for digest in (document["code"].get("search"), "another")]
    same = (BENCHMARKS / "RESULTS.md").read_text() in pages
    assert same, "run `python benchmarks/replay_results.py --from benchmarks/recorded/replay-results.json`"


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


def test_the_sentences_of_the_readmes_are_the_records(results: ModuleType) -> None:
    """What prose says of how much of the frontier is found, of many limits, and of drift."""
    readme, text = (BENCHMARKS.parent / "README.md").read_text(), (BENCHMARKS / "README.md").read_text()
    found = figures("replay-results.json")["problems"]
    frontier = re.search(r"has found (\d+)% to (\d+)%", importlib.import_module("replay_answer")._frontier(found))
    assert frontier and f"covers {frontier[1]} to {frontier[2]} % of the whole frontier" in readme
    near, *_ = re.findall(r"(\d+) of (\d+)", last_row("replay_limits", "replay-limits.json"))
    assert f"missed under {int(near[1]) - int(near[0])} of the {near[1]} limits" in " ".join(text.split())
    every, at_4, at_7 = re.findall(r"(\d+) of (\d+)", last_row("replay_drift", "replay-drift.json"))
    shares = [f"{int(held) / int(of):.0%}".replace("%", " %") for held, of in (at_4, at_7)]
    assert (
        every[0] == every[1] and f"At 4 % the bound holds in {shares[0]} of the searches; at 7 % in {shares[1]}" in text
    )


def last_row(module: str, record: str) -> str:
    """All problems together, of a record's table."""
    row: str = importlib.import_module(module).table_of(figures(record)).strip().splitlines()[-1]
    assert row.startswith("| all |")
    return row


def test_the_figures_are_of_the_present_search(results: ModuleType) -> None:
    """Skipped where they are not: a change of the search need not wait for its replays."""
    made = figures("replay-results.json")["code"]
    assert made["search"] and made["revision"], "the record names the search that it is of"
    if made["search"] != results.code_of(results.SEARCH):
        pytest.skip(f"RESULTS.md is of the search of revision {made['revision']}: `make results` makes it again")


def test_the_first_replays_are_in_the_readme(results: ModuleType) -> None:
    """Of each table that nobody had seen: how the search did whose rules were set before, faults included."""
    text = (BENCHMARKS / "README.md").read_text()
    known = importlib.import_module("replay_fitted").FIRST_SEARCH
    tables = figures("first-replays.json")
    assert {one["table"]: one["code"]["search"] for one in tables} == known
    for problem in (problem for one in tables for problem in one["problems"]):
        trials, slower = problem["trials"]["median"], problem["slower_by"]["median"]
        shown = (
            f"| {'never' if trials is None else f'{trials:g}'} | {problem['out_of_memory']['median']:g} | {slower:.1%} "
        )
        name = problem["name"].removeprefix("cpu-zen5-2c-")
        assert any(line.startswith(f"| {name}") and shown in line for line in text.splitlines()), problem
