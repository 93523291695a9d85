"""Searches that are kept: nothing that decides a search may change without its being run again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from unit.bench.made_tables import recorded
from unit.search.made_truth import Truth

from autofit.bench import replay as module
from autofit.bench.recorded import Recorded
from autofit.bench.replay import Wanted, _file_name


def test_what_a_search_follows_from(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recorded(truth)
    problem = made.problem

    def name(method: str = "autofit", seed: int = 0, table: Recorded = made) -> str:
        return _file_name(table, Wanted(problem.name, method, seed))

    others = [
        name(),
        name("optuna-random"),
        name(seed=1),
        name(table=replace(made, problem=replace(problem, memory_limit_bytes=1))),
        name(table=replace(made, digest="of another table")),
    ]
    monkeypatch.setattr(module, "_code", lambda is_ours: f"another program {is_ours}")
    others += [name(), name("optuna-random")]
    assert len(set(others)) == len(others)
    assert name() == name()


def test_the_whole_package_decides_our_search_and_a_part_of_it_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("bench", "core", "techniques", "search"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "some.py").write_text("one = 1\n")
    monkeypatch.setattr(module, "PACKAGE", tmp_path)
    code = module._code.__wrapped__
    before = code(True), code(False)
    (tmp_path / "search" / "some.py").write_text("one = 2\n")
    assert code(True) != before[0] and code(False) == before[1]
    for folder in ("bench", "core"):  # a kept trace is of core's trials
        of_rivals = code(False)
        (tmp_path / folder / "some.py").write_text("one = 2\n")
        assert code(False) != of_rivals
    ours = code(True)
    monkeypatch.setattr(module, "distributions", lambda: [])
    assert code(True) != ours
