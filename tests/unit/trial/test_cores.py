"""With how many threads a trial computes on the processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.trial.machine import cores


def test_a_core_with_two_hardware_threads_computes_with_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "CORES", tmp_path)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: {0, 1, 2, 4, 5})
    monkeypatch.setattr(cores.control_groups, "processors", float)
    for number, siblings in ((0, "0,4"), (4, "0,4"), (1, "1,5"), (5, "1,5")):  # of 2 the kernel says nothing
        (tmp_path / f"cpu{number}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{number}" / "topology" / "thread_siblings_list").write_text(siblings)
    assert (cores.cores(), cores.threads()) == (5, 3)
    assert (cores.hardware_threads(3), cores.hardware_threads(1)) == (5, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert cores.threads() == 4
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(cores.control_groups, "processors", lambda allowed: 2.5)
    assert cores.threads() == 2
