"""Searches that were kept: they are the same when they are read, and not believed where something else would follow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from unit.operations.made_trials import out_of_memory
from unit.search.made_tables import recorded, run
from unit.search.made_truth import Truth

from autofit.lattice import Config
from autofit.outcome import TimedOut
from autofit.search.replay import kept as module
from autofit.search.replay.kept import KeptSearches, identity, once_more, searched
from autofit.search.replay.methods import METHODS
from autofit.search.replay.oracle import Oracle
from autofit.search.replay.problem import Problem
from autofit.search.replay.recorded import Recorded
from autofit.search.replay.trace import Stated


@pytest.fixture(scope="module")
def table(truth: Truth) -> Recorded:
    """Two thirds of a grid, so that samplers ask for what is not there."""
    places = {config: number for number, config in enumerate(truth.lattice.configs)}
    return recorded(truth, keep=lambda config: places[config] % 3 > 0)


def twice(problem: Problem, oracle: Oracle, seed: int) -> None:
    """A method that asks for one config, runs it again, and recommends it."""
    oracle.ask(problem.configs[seed])
    oracle.run_again(problem.configs[seed])
    oracle.hear(Stated(config=problem.configs[seed], regret_bound=0.1))


def shelf(folder: Path, table: Recorded, name: str) -> KeptSearches:
    return KeptSearches.of(folder, table, name, METHODS[name])


@pytest.mark.parametrize("name", ["optuna-random", "deepspeed-grid", "checklist"])
def test_a_kept_search_is_the_search(name: str, table: Recorded, tmp_path: Path) -> None:
    shelves = shelf(tmp_path, table, name)
    assert shelves.traces() == {}
    expected = {}
    for seed in (0, 3):
        search, expected[seed] = searched(table, METHODS[name], seed)
        assert expected[seed] == run(table, METHODS[name], seed)
        shelves.add(search)
    assert shelf(tmp_path, table, name).traces() == expected
    if name == "optuna-random":
        assert any(trace.outside for trace in expected.values())
        first = json.loads(shelves.file.read_text().splitlines()[1])
        assert any(isinstance(entry, list) for entry in first["asked"])


def test_a_second_run_and_a_stated_regret_are_kept(table: Recorded, tmp_path: Path) -> None:
    shelves = KeptSearches.of(tmp_path, table, "twice", twice)
    search, trace = searched(table, twice, 1)
    assert len(trace.runs) == 2 and trace.stopped and trace.stated is not None
    shelves.add(search)
    assert shelves.traces() == {1: trace}


def test_a_trial_that_was_cut_is_kept_as_it_ended(table: Recorded, tmp_path: Path) -> None:
    ended = TimedOut(reason="a step takes long", deadline_seconds=3.0, least_step_seconds=9.0, is_proven=True)

    def impatient(problem: Problem, oracle: Oracle, seed: int) -> None:
        oracle.ask(problem.configs[0], lambda trial: replace(trial, outcome=ended, seconds=3.0))
        oracle.ask(problem.configs[1])

    shelves = KeptSearches.of(tmp_path, table, "impatient", impatient)
    search, trace = searched(table, impatient, 0)
    shelves.add(search)
    assert trace.runs[0].outcome == ended and shelves.traces() == {0: trace}


def test_a_value_that_the_problem_does_not_know_is_kept_in_full(table: Recorded, tmp_path: Path) -> None:
    def outside(problem: Problem, oracle: Oracle, seed: int) -> None:
        oracle.ask(problem.configs[0].replace(micro_batch=3))

    shelves = KeptSearches.of(tmp_path, table, "outside", outside)
    search, trace = searched(table, outside, 0)
    shelves.add(search)
    assert trace.outside == 1 and shelves.traces() == {0: trace}


def test_what_was_cut_off_is_not_read_and_the_next_is(table: Recorded, tmp_path: Path) -> None:
    shelves = shelf(tmp_path, table, "checklist")
    for seed in range(3):
        shelves.add(searched(table, METHODS["checklist"], seed)[0])
        if seed < 2:
            text = shelves.file.read_text()
            shelves.file.write_text(text[:-20] if seed == 1 else text)
    assert set(shelves.traces()) == {0, 2}


def changed(table: Recorded, config: Config, **values: object) -> Recorded:
    return replace(table, trials={**table.trials, config: replace(table.trials[config], **values)})


def test_other_answers_are_another_search(table: Recorded) -> None:
    search, trace = searched(table, METHODS["deepspeed-grid"], 0)
    assert trace.stopped and once_more(table, search) == trace
    first, never = trace.runs[0].config, next(c for c in table.trials if c not in {r.config for r in trace.runs})
    assert once_more(changed(table, first, seconds=99.0), search) is None
    assert once_more(changed(table, first, outcome=out_of_memory()), search) is None
    assert once_more(changed(table, never, outcome=out_of_memory()), search) is not None


def test_a_search_that_was_ended_must_end_there(table: Recorded) -> None:
    search, trace = searched(table, METHODS["optuna-random"], 0)
    assert not trace.stopped and once_more(table, search) == trace
    assert once_more(table, replace(search, asked=search.asked[:-1])) is None
    assert once_more(table, replace(search, asked=(*search.asked, search.asked[0]))) is None


def test_what_a_search_follows_from(table: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(name: str, table: Recorded = table) -> dict[str, object]:
        return identity(table.problem, name, METHODS[name])

    ours, rival = of("autofit"), of("optuna-random")
    assert json.loads(json.dumps(ours)) == ours
    assert set(rival["libraries"]) == {"python", "numpy", "optuna", "scipy", "torch"}  # type: ignore[call-overload]
    narrower = replace(table, problem=replace(table.problem, memory_limit_bytes=1))
    fewer = replace(table, problem=replace(table.problem, configs=table.problem.configs[1:]))
    for other in (narrower, fewer):
        assert of("autofit", other) != ours and of("optuna-random", other) != rival
    taught = replace(table, problem=replace(table.problem, others=("another table",)))
    assert of("optuna-random", taught) == rival and of("autofit", taught) != ours
    monkeypatch.setattr(module, "installed", lambda library: "0.0.1")
    assert of("optuna-random") != rival


def test_comments_and_docstrings_are_no_code() -> None:
    plain = "def f(a):\n    return a + 1\n"
    said = '"""Why."""\n# and how\ndef f(a):\n    """More."""\n    return (a + 1)  # so\n'
    assert module._bare(plain) == module._bare(said)
    assert module._bare(plain) != module._bare(plain.replace("1", "2"))


def test_every_rival_is_known_by_its_module() -> None:
    foreign = {method.__module__ for method in METHODS.values()} - {"autofit.search.replay.ours"}
    assert foreign == set(module.RIVALS)
    assert all(module.installed(library) for library in ("numpy", "optuna", "torch", "deepspeed", "accelerate"))
    assert module.installed("no-such-library-anywhere") is None
