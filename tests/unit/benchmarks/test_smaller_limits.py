"""A table against trials under real limits: what is measured again, and what that says. Nothing is trained here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from unit.operations.made_trials import crashed, fits, make_trial, out_of_memory

from autofit.outcome import Fits, Outcome, Trial
from autofit.store import read_lines
from autofit.units import GIB
from autofit.workers.pool import Completed

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
LIMIT = 24 * GIB


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("smaller_limits")


def trial(rank: int, gib: float, speed: float = 512, *, allocated: float) -> Trial:
    return make_trial({"method": "lora", "rank": rank}, fits(gib, speed, allocated=allocated))


TRIALS = (
    trial(1, 5, 9000, allocated=4),
    trial(2, 20, allocated=19),
    trial(3, 21, allocated=19),
    trial(4, 22, allocated=19),
    trial(5, 24, allocated=23),
    trial(6, 25, 700, allocated=23.5),
    trial(7, 25, allocated=24.5),
    trial(8, 60, allocated=20),
    make_trial({"method": "full"}, out_of_memory()),
)


def chosen(found: list[Any]) -> dict[int, bool]:
    return {case.recorded.config["rank"]: case.fits for case in found}


def test_what_a_replay_could_get_wrong_is_measured(script: ModuleType) -> None:
    assert chosen(script.cases(TRIALS, LIMIT)) == {1: True, 5: True, 4: True, 3: True, 6: False, 8: False}
    assert chosen(script.cases(TRIALS, 4 * GIB)) == {}
    second = TRIALS[1].outcome
    assert isinstance(second, Fits)
    built = Fits(measurement=replace(second.measurement, setup_peak_bytes=30 * GIB))
    assert 2 in chosen(script.cases([TRIALS[0], replace(TRIALS[1], outcome=built), *TRIALS[2:]], LIMIT))


class World:
    """Stands in for the workers: answers by rank, and counts."""

    def __init__(self, answers: dict[int, Outcome]) -> None:
        self.answers, self.asked, self.site_of = answers, list[int](), TRIALS[0]

    def open(self, device: str) -> Any:
        def submit(request: Any) -> None:
            self.request = request
            self.asked.append(request.config["rank"])

        def wait(timeout: float) -> list[Completed]:
            outcome = self.answers[self.request.config["rank"]]
            return [Completed(request=self.request, outcome=outcome, seconds=3.0)]

        return SimpleNamespace(
            submit=submit, wait=wait, site=lambda: (self.site_of.hardware, self.site_of.stack), close=lambda: None
        )


@pytest.fixture
def call(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the script with a world's answers; returns its exit status."""
    first = TRIALS[0]
    table = SimpleNamespace(trials=TRIALS, memory_limit_bytes=80 * GIB, hardware=first.hardware, stack=first.stack)
    monkeypatch.setattr(script, "read_whole", lambda file: table)

    def run(world: World, *arguments: str) -> int:
        monkeypatch.setattr(script, "InPlacePool", world.open)
        out = str(tmp_path / "limits.jsonl")
        monkeypatch.setattr("sys.argv", ["s", "t.jsonl", out, "--limits", "24GiB,90GiB", *arguments])
        status: int = script.main()
        return status

    return run


def answers(**changed: Outcome) -> dict[int, Outcome]:
    """What fits the table fits; of what exceeds the limit, one trains, somewhat slower."""
    found: dict[int, Outcome] = {t.config.number("rank"): t.outcome for t in TRIALS[:5]}
    found |= {6: fits(23.9, 600, allocated=23.5), 8: out_of_memory()}
    return found | {int(rank.removeprefix("rank")): outcome for rank, outcome in changed.items()}


def test_what_the_trials_say_is_told_once_all_have_run(call: Any, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(answers(rank4=replace(crashed(), transient=True)))
    assert call(world, "--time-budget", "0") == 75 and not world.asked
    assert call(world) == 75, "a failure of the machinery is tried again"
    assert world.asked == [1, 5, 4, 3, 6, 8]
    again = World(answers())
    assert call(again) == 0 and again.asked == [4]
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == (
        "t.jsonl: 4 of 4 configs fit that fit by the table; of 2 that exceed a limit only by what the allocator had "
        "cached, 1 train all the same"
    )
    assert any("exceeds it, 25.00 GiB; under it fits, 23.90 GiB, speed -14.3%" in line for line in said)


def test_a_table_that_is_wrong_about_what_fits_is_told(call: Any, tmp_path: Path) -> None:
    assert call(World(answers(rank5=out_of_memory()))) == 1
    with (tmp_path / "limits.jsonl").open() as lines:
        kept = list(read_lines(lines))
    assert {t.memory_limit_bytes for t in kept} == {LIMIT} and sum(isinstance(t.outcome, Fits) for t in kept) == 4
    assert call(World({})) == 1, "nothing is left to measure"


def test_a_line_that_was_not_finished_is_measured_again(call: Any, tmp_path: Path) -> None:
    call(World(answers()))
    file = tmp_path / "limits.jsonl"
    file.write_text(file.read_text()[:-30])
    world = World(answers())
    assert call(world) == 0 and world.asked == [8]


def test_another_machine_is_refused(call: Any, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(answers())
    world.site_of = replace(TRIALS[0], stack=replace(TRIALS[0].stack, torch="2.11.0"))
    assert call(world) == 4 and not world.asked
    assert "measure where the table was recorded" in capsys.readouterr().err
