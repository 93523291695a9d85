"""The program that records on a GPU: what it runs, in which order, and how it ends. Nothing is trained here."""

from __future__ import annotations

import importlib
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from unit.operations.made_trials import fits, make_trial, out_of_memory

from autofit.core.outcome import Fits
from autofit.core.units import GIB

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


@pytest.fixture
def call(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the program; answers with its exit status and the commands that it ran, which do nothing but fail where told
    (`failing`: a word of the command, and its status) and say what is left to record."""

    def run(*arguments: str, failing: tuple[str, int] = ("", 0), left: int = 0) -> tuple[int, list[str]]:
        asked: list[str] = []

        def done(self: Any, *command: str) -> subprocess.CompletedProcess[str]:
            words = [word for word in command if word not in gpu.AUTOFIT]
            asked.append(" ".join(words))
            status = failing[1] if failing[0] and failing[0] in asked[-1] else 0
            return subprocess.CompletedProcess(command, status, stdout=json.dumps({"left": left, "outcome": "fits"}))

        monkeypatch.setattr(gpu.Recording, "run", done)
        monkeypatch.setattr("sys.argv", ["gpu.py", str(tmp_path / "out"), *arguments])
        return gpu.main(), asked

    return run


def firsts(commands: list[str]) -> list[str]:
    return [command.split()[0] for command in commands]


def test_every_axis_is_recorded_in_several_calls_and_then_compared(call: Any) -> None:
    status, commands = call("every-axis", left=3)
    assert status == 75 and firsts(commands) == ["doctor", "bench", "bench", "bench"], "nothing is compared yet"
    assert "--build-ops" in commands[0], "on every machine that a call may run on"
    assert all("--in-place" in command and "--cover" in command for command in commands[1:])
    assert {command.split("--seed ")[1].split()[0] for command in commands[1:]} == {"0", "1", "2"}
    status, commands = call("every-axis", failing=("estimate_trials.py", 1))
    assert status == 1 and commands[1].endswith("--json") and "--max-trials 24" in commands[1]
    assert all(f"every-axis-{model}.jsonl" in commands[4] for model in ("llama-3.1-8b", "llama-3.2-1b", "qwen2.5-0.5b"))
    status, commands = call("every-axis", failing=("record", 4))
    assert status == 4 and len(commands) == 2, "a recording that fails ends it"


@pytest.mark.parametrize("space", ["offload", "offload-large-host"])
def test_a_recording_of_offload_is_compared(call: Any, space: str) -> None:
    status, commands = call(space)
    assert status == 0 and firsts(commands)[:2] == ["doctor", "bench"]
    assert "estimate_trials.py" in commands[2] and "--least 1 " in commands[2]
    assert space.replace("-", "_").removeprefix("offload") in commands[1]


def test_nothing_begins_once_the_time_is_over(call: Any) -> None:
    status, commands = call("all", "--seconds", "0")
    assert status == 75 and commands == []


def trial(rank: int, gib: float, speed: float = 512, *, allocated: float) -> Any:
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


def test_what_a_replay_could_get_wrong_is_measured(gpu: ModuleType) -> None:
    def chosen(trials: Any, gib: int) -> dict[Any, bool]:
        return {
            config["rank"]: fits for config, fits in gpu.doubtful(SimpleNamespace(trials=trials), gib * GIB).items()
        }

    assert chosen(TRIALS, 24) == {1: True, 5: True, 4: True, 3: True, 6: False, 8: False}
    assert chosen(TRIALS, 4) == {}
    built = Fits(measurement=replace(TRIALS[1].outcome.measurement, setup_peak_bytes=30 * GIB))
    assert 2 in chosen([TRIALS[0], replace(TRIALS[1], outcome=built), *TRIALS[2:]], 24)


def test_tables_are_recorded_before_smaller_limits_are_tried(
    gpu: ModuleType, call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = SimpleNamespace(trials=TRIALS, workload=TRIALS[0].workload, memory_limit_bytes=70 * GIB)
    monkeypatch.setattr(gpu, "read_table", lambda file, whole: table)
    status, commands = call("tables", left=1)
    assert status == 75 and firsts(commands) == ["doctor", "bench", "bench"]
    status, commands = call("tables")
    assert status == 0 and firsts(commands)[:2] == ["bench", "bench"], "the machine is checked once"
    tried = [command for command in commands if command.startswith("trial")]
    assert {command.split("--memory-limit ")[1].split()[0] for command in tried} == {"24GiB", "40GiB"}
    assert firsts(call("tables")[1]) == ["bench", "bench"], "each is measured once"
    file = tmp_path / "out" / "limits-grid-llama-3.1-8b.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[0]["trial"]["outcome"] = "out_of_memory"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert lines[0]["fits_by_table"] and call("tables")[0] == 1
