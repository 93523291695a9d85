"""Two processes that run trials on the same cores: the second says so."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autofit.workers import alone

HOLD = "from autofit.workers.alone import warn_unless_alone; warn_unless_alone(); print('held', flush=True); input()"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which nobody else runs trials, this process included."""
    monkeypatch.setattr(alone, "_held", [])
    monkeypatch.setattr(alone.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield


def test_who_is_alone_says_nothing_however_often_it_asks(caplog: pytest.LogCaptureFixture) -> None:
    alone.warn_unless_alone()
    alone.warn_unless_alone()
    assert caplog.records == []


def test_who_is_not_is_told_until_the_other_ends(caplog: pytest.LogCaptureFixture) -> None:
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with caplog.at_level(logging.WARNING):
            alone.warn_unless_alone()
        assert ["another process is running trials" in record.getMessage() for record in caplog.records] == [True]
        other.communicate("\n")
    caplog.clear()
    alone.warn_unless_alone()
    assert caplog.records == []


def test_no_place_for_a_lock_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alone.tempfile, "tempdir", str(tmp_path / "none"))
    alone.warn_unless_alone()
    assert caplog.records == [] and alone._held == []
