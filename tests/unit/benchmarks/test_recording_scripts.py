"""The scripts that record on a GPU: what they search, and how they end."""

from __future__ import annotations

import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from unit.operations.made_trials import STACK, make_job

from autofit.hardware import Hardware
from autofit.lattice import Value
from autofit.space import load
from autofit.techniques import AXES, complete, unsupported

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PAGED = "paged-adamw-8bit"


def test_the_recorded_space_is_the_built_in_one_without_paged_states() -> None:
    built_in, recorded = load("single-gpu", AXES), load(str(BENCHMARKS / "single_gpu_resident.yaml"), AXES)
    configs = {config for config in built_in.configs(AXES, batch=64) if config["optimizer"] != PAGED}
    assert set(recorded.configs(AXES, batch=64)) == configs
    assert PAGED in built_in.axes["optimizer"]


def test_what_needs_a_large_host_is_recorded_only_when_asked() -> None:
    usual, large = (
        set(load(str(BENCHMARKS / name), AXES).configs(AXES, batch=16))
        for name in ("offload_8b.yaml", "offload_8b_large_host.yaml")
    )
    assert usual and large and not usual & large
    assert {config["offload"] for config in usual} == {"none", "optimizer", "params"}
    assert all(config["precision"] == "bf16-mixed" and config["offload"] != "none" for config in large)


@pytest.fixture
def called(tmp_path: Path) -> Path:
    """A stand-in for Python that notes its arguments, one call a line, fails where $FAIL, `WORD:STATUS`, says, and
    prints what $LEFT says is left to record."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        '#!/usr/bin/env bash\necho "$*" >>"$CALLS"\nfor word in "$@"; do\n'
        '  [[ $word == "${FAIL%%:*}" ]] && exit "${FAIL##*:}"\ndone\n'
        'echo "{ \\"left\\": ${LEFT:-0} }"\nexit 0\n'
    )
    stand_in.chmod(0o755)
    return stand_in


def run(script: str, stand_in: Path, *arguments: str, fail: str = "nothing:0", left: int = 0) -> tuple[int, list[str]]:
    """The script's exit status, and the calls of Python that it made."""
    calls = stand_in.with_name("calls")
    calls.write_text("")
    done = subprocess.run(
        [str(BENCHMARKS / script), str(stand_in.with_name("out")), *arguments],
        env={**os.environ, "PYTHON": str(stand_in), "CALLS": str(calls), "FAIL": fail, "LEFT": str(left)},
        capture_output=True,
        text=True,
    )
    return done.returncode, calls.read_text().splitlines()


def test_a_search_that_fails_is_exported_and_told(called: Path) -> None:
    called.with_name("out").mkdir()
    (called.with_name("out") / "store.db").touch()
    status, calls = run("record_gpu_search.sh", called, "90s", fail="search:3")
    assert status == 3
    assert [call.split()[2] for call in calls] == ["doctor", "search", "db"]
    assert "--in-place" in calls[1] and "--time-budget 90s" in calls[1]
    status, calls = run("record_gpu_search.sh", called)
    assert status == 0
    assert [call.split()[2] for call in calls] == ["search", "db"], "a further run does not check the machine again"


def test_a_recording_of_offload_is_limited_and_compared(called: Path) -> None:
    status, calls = run("record_gpu_offload.sh", called, "2")
    assert status == 0
    assert "doctor" in calls[0] and "--build-ops" in calls[0]
    assert "bench record" in calls[1] and "--max-trials 2" in calls[1] and "--in-place" in calls[1]
    assert "estimate_trials.py" in calls[2] and "offload_8b.jsonl" in calls[2]
    assert "--trained offload=params,optimizer,none" in calls[2], "every value that the space has"
    status, calls = run("record_gpu_offload.sh", called, "4", "offload_8b_large_host.yaml")
    assert "--trained offload=params,optimizer " in calls[2]
    status, calls = run("record_gpu_offload.sh", called, "4", "offload_8b_large_host.yaml", fail="record:4")
    assert status == 4 and len(calls) == 2
    assert "offload_8b_large_host.jsonl" in calls[1], "a table of its own"


EVERY_AXIS, TABLES = "record_gpu_every_axis.sh", "record_gpu_tables.sh"


def test_every_axis_is_recorded_in_several_calls_and_then_compared(called: Path) -> None:
    status, calls = run(EVERY_AXIS, called, "90", left=3)
    assert status == 75
    assert [call.split()[2] for call in calls] == ["doctor", "bench", "bench", "bench"], "nothing is compared yet"
    assert all("--in-place" in call and "--cover" in call and "--time-budget" in call for call in calls[1:])
    assert {call.split("--seed ")[1].split()[0] for call in calls[1:]} == {"0", "1", "2"}
    status, calls = run(EVERY_AXIS, called, "90", "8", fail="benchmarks/estimate_trials.py:1")
    assert status == 1, "the targets are missed"
    assert [call.split()[2] for call in calls[:4]] == ["doctor", *["bench"] * 3] and "--max-trials 8" in calls[1]
    assert "--build-ops" in calls[0], "on every machine that a call may run on"
    assert all(f"every-axis-{model}.jsonl" in calls[4] for model in ("llama-3.1-8b", "llama-3.2-1b", "qwen2.5-0.5b"))
    status, calls = run(EVERY_AXIS, called, fail="record:4")
    assert status == 4 and len(calls) == 2, "a recording that fails ends it"


def test_no_recording_begins_once_the_time_is_over(called: Path) -> None:
    for script in (EVERY_AXIS, TABLES):
        assert run(script, called, "90", left=1)[0] == 75
        status, calls = run(script, called, "0")
        assert status == 75 and not any("bench" in call for call in calls), "nothing is recorded, and nothing compared"


def test_tables_are_recorded_before_smaller_limits_are_tried(called: Path) -> None:
    status, calls = run(TABLES, called, "90", left=1)
    assert status == 75 and [call.split()[2] for call in calls] == ["doctor", "bench", "bench"]
    status, calls = run(TABLES, called, "90", "llama-3.1-8b")
    assert status == 0 and len(calls) == 2
    assert "grid-llama-3.1-8b.jsonl" in calls[0] and "smaller_limits.py" in calls[1] and "24GiB" in calls[1]
    status, calls = run(TABLES, called, "90", fail="benchmarks/smaller_limits.py:75")
    assert status == 75 and len(calls) == 3
    status, calls = run(TABLES, called, "90", fail="benchmarks/smaller_limits.py:1")
    assert status == 1 and len(calls) == 4, "the other model is checked all the same"


def values_of(space: str) -> dict[str, set[Value]]:
    """The values that the space's configs of micro-batch 1 have on each axis."""
    found: dict[str, set[Value]] = {axis.name: set() for axis in AXES}
    for config in load(str(BENCHMARKS / space), AXES).configs(AXES, batch=1):
        for axis, value in config.items:
            found[axis].add(value)
    return found


def test_every_axis_of_a_gpu_has_every_value_that_trains_on_one_card() -> None:
    found = values_of("gpu_every_axis.yaml")
    left_out = {axis.name: set(axis.values) - found[axis.name] for axis in AXES}
    assert {name: values for name, values in left_out.items() if values} == {
        "optimizer": {PAGED},
        "offload": {"nvme"},
        "sharding": {value for axis in AXES if axis.name == "sharding" for value in axis.values} - {"none"},
    }
    assert len(found["rank"]) > 1


def test_every_axis_of_a_processor_has_every_value_that_it_can_be_timed_with() -> None:
    found = values_of("every_axis.yaml")
    processor = Hardware(name="cpu", kind="cpu", device_name="c", memory_bytes=1, cores=2)
    job = make_job(hardware=processor, stack=replace(STACK, deepspeed="0.19.8"))
    lacking = {
        (axis.name, value)
        for axis in AXES
        for value in set(axis.values) - found[axis.name]
        if unsupported(complete({"method": "lora", axis.name: value}), job) is None
    }
    assert lacking == {("precision", "fp16-mixed"), ("offload", "nvme")}
    assert len(found["rank"]) > 1


def test_the_grid_is_complete_for_each_method_and_of_a_size_that_can_be_recorded() -> None:
    configs = list(load(str(BENCHMARKS / "gpu_grid.yaml"), AXES).configs(AXES, batch=16))
    assert 100 <= len(configs) <= 200
    for method in ("full", "lora", "qlora"):
        own = [config for config in configs if config["method"] == method]
        counts = [len({config.get(axis.name) for config in own}) for axis in AXES]
        assert len(own) == math.prod(counts) > 30


def test_every_part_of_the_exactness_tests_runs(called: Path) -> None:
    status, calls = run("record_gpu_exactness.sh", called, fail="pair:1")
    assert status == 1
    assert [part for call in calls for part in ("alone", "pair", "sixteen", "compiled") if f"-k {part} " in call] == [
        "alone", "pair", "sixteen", "compiled",
    ]  # fmt: skip
    status, calls = run("record_gpu_exactness.sh", called, "alone")
    assert status == 0 and len(calls) == 1
