"""Searches that are kept: nothing that decides a search may change without its being run again."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from unit.bench.made_tables import recorded, run
from unit.search.made_truth import Truth

from autofit.bench import replay as module
from autofit.bench.methods import METHODS
from autofit.bench.recorded import Recorded
from autofit.bench.replay import Wanted, _file_name
from autofit.catalog.kept import keep_file


@pytest.fixture(scope="module")
def table(truth: Truth) -> Recorded:
    """Two thirds of a grid, so that samplers ask for what is not there."""
    places = {config: number for number, config in enumerate(truth.lattice.configs)}
    return recorded(truth, keep=lambda config: places[config] % 3 > 0)


@pytest.mark.parametrize("name", ["autofit", "optuna-random", "checklist"])
def test_a_kept_search_is_the_search(name: str, table: Recorded, tmp_path: Path) -> None:
    trace = run(table, METHODS[name], 3)
    file = tmp_path / "folder" / "search.pickle"
    keep_file(file, pickle.dumps(trace))
    assert pickle.loads(file.read_bytes()) == trace and [found.name for found in file.parent.iterdir()] == [file.name]


def test_what_a_search_follows_from(table: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = table.problem

    def name(method: str = "autofit", seed: int = 0, table: Recorded = table) -> str:
        return _file_name(table, Wanted(problem.name, method, seed))

    others = [
        name(),
        name("optuna-random"),
        name(seed=1),
        name(table=replace(table, problem=replace(problem, memory_limit_bytes=1))),
        name(table=replace(table, digest="of another table")),
    ]
    monkeypatch.setattr(module, "_code", lambda is_ours: f"another program {is_ours}")
    others += [name(), name("optuna-random")]
    assert len(set(others)) == len(others)
    assert name() == name()


def test_the_whole_package_decides_our_search_and_a_part_of_it_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("bench", "techniques", "search"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "some.py").write_text("one = 1\n")
    monkeypatch.setattr(module, "PACKAGE", tmp_path)
    code = module._code.__wrapped__
    before = code(True), code(False)
    (tmp_path / "search" / "some.py").write_text("one = 2\n")
    assert code(True) != before[0] and code(False) == before[1]
    (tmp_path / "bench" / "some.py").write_text("one = 2\n")
    assert code(False) != before[1]
    ours = code(True)
    monkeypatch.setattr(module, "distributions", lambda: [])
    assert code(True) != ours
