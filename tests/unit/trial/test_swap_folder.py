"""The folder of a trial that swaps to files: its own, gone when it has ended, and never another's."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from autofit.core.lattice import Config
from autofit.core.outcome import Crashed, Diverged
from autofit.techniques.axes.sharding import NVME_VARIABLE
from autofit.trial.limits.swap_folder import explained, swap_folder
from autofit.trial.process.classify import stopped

SWAPS = Config.of({"offload": "nvme"})


def test_a_trial_has_its_own_for_as_long_as_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NVME_VARIABLE, str(tmp_path))
    with swap_folder(SWAPS) as first, swap_folder(SWAPS) as second:
        assert first != second
        (Path(first[NVME_VARIABLE]) / "zero_stage_3").mkdir()
        assert len(list(tmp_path.iterdir())) == 2
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_of_this_machine_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NVME_VARIABLE, str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    with swap_folder(SWAPS) as running:
        present = Path(running[NVME_VARIABLE]).name
        left = present.replace(f"-{os.getpid()}-", f"-{ended.pid}-")
        elsewhere = left.replace("autofit-trial-", "autofit-trial-another-")
        for name in (left, elsewhere, "somebody's"):
            (tmp_path / name).mkdir()
        with swap_folder(SWAPS):
            assert not (tmp_path / left).exists()
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted([present, elsewhere, "somebody's"])


@pytest.mark.parametrize("config", [Config.of({"offload": "params"}), Config.of({})])
def test_nothing_is_made_for_a_trial_that_does_not_swap(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NVME_VARIABLE, str(tmp_path))
    with swap_folder(config) as added:
        assert added == {}
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_where_a_trial_has_crashed_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swaps = {NVME_VARIABLE: str(tmp_path / "name")}
    crashed = Crashed(reason="the trial's process died of SIGABRT", signal="SIGABRT")
    others = (Diverged(reason="the loss is not finite"), stopped("build"))
    usage = namedtuple("usage", ("total", "used", "free"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(2**40, 2**40 - 64 * 1024**2, 64 * 1024**2))
    assert explained(crashed, swaps) == crashed
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(2**40, 2**40 - 2**20, 2**20))
    reason = f"the disk of {tmp_path} was full, with 1 MiB left: the trial's process died of SIGABRT"
    assert explained(crashed, swaps) == replace(crashed, reason=reason, transient=True)
    assert explained(crashed, {}) == crashed, "it had no files"
    assert tuple(explained(other, swaps) for other in others) == others
