"""The scripts that record on a GPU: what they search, and how they end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from autofit.space import load
from autofit.techniques import AXES

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
    """A stand-in for Python that notes its arguments, one call a line, and fails where $FAIL, `WORD:STATUS`, says."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        '#!/usr/bin/env bash\necho "$*" >>"$CALLS"\nfor word in "$@"; do\n'
        '  [[ $word == "${FAIL%%:*}" ]] && exit "${FAIL##*:}"\ndone\nexit 0\n'
    )
    stand_in.chmod(0o755)
    return stand_in


def run(script: str, stand_in: Path, *arguments: str, fail: str = "nothing:0") -> tuple[int, list[str]]:
    """The script's exit status, and the calls of Python that it made."""
    calls = stand_in.with_name("calls")
    calls.unlink(missing_ok=True)
    done = subprocess.run(
        [str(BENCHMARKS / script), str(stand_in.with_name("out")), *arguments],
        env={**os.environ, "PYTHON": str(stand_in), "CALLS": str(calls), "FAIL": fail},
        capture_output=True,
        text=True,
        timeout=60,
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
    status, calls = run("record_gpu_offload.sh", called, "4", "offload_8b_large_host.yaml", fail="record:4")
    assert status == 4 and len(calls) == 2
    assert "offload_8b_large_host.jsonl" in calls[1], "a table of its own"


def test_every_part_of_the_exactness_tests_runs(called: Path) -> None:
    status, calls = run("record_gpu_exactness.sh", called, fail="pair:1")
    assert status == 1
    assert [part for call in calls for part in ("alone", "pair", "sixteen", "compiled") if f"-k {part} " in call] == [
        "alone", "pair", "sixteen", "compiled",
    ]  # fmt: skip
    status, calls = run("record_gpu_exactness.sh", called, "alone")
    assert status == 0 and len(calls) == 1
