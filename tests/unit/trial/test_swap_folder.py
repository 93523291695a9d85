"""The folder of a trial that swaps to files: its own, gone when it has ended, and never another's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from autofit.techniques.sharding import NVME_VARIABLE
from autofit.trial.swap_folder import swap_folder

REQUEST = {"config": {"offload": "nvme"}}


def test_a_trial_has_its_own_for_as_long_as_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NVME_VARIABLE, str(tmp_path))
    with swap_folder(REQUEST) as first, swap_folder(REQUEST) as second:
        assert first != second
        (Path(first[NVME_VARIABLE]) / "zero_stage_3").mkdir()
        assert len(list(tmp_path.iterdir())) == 2
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_of_this_machine_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NVME_VARIABLE, str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    with swap_folder(REQUEST) as running:
        own = Path(running[NVME_VARIABLE]).name
        left = own.replace(f"-{os.getpid()}-", f"-{ended.pid}-")
        elsewhere = left.replace("autofit-trial-", "autofit-trial-another-")
        for name in (left, elsewhere, "somebody's"):
            (tmp_path / name).mkdir()
        with swap_folder(REQUEST):
            assert not (tmp_path / left).exists()
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted([own, elsewhere, "somebody's"])


@pytest.mark.parametrize("request_", [{"config": {"offload": "params"}}, {}])
def test_nothing_is_made_for_a_trial_that_does_not_swap(
    request_: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NVME_VARIABLE, str(tmp_path))
    with swap_folder(request_) as added:
        assert added == {}
    assert list(tmp_path.iterdir()) == []
