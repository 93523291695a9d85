"""Runs the program in this process: arguments in, exit code and both output streams out."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from unit.operations.made_world import World

from autofit.core.device.state import DeviceState
from tests.here import run_here
from tests.made_stores import put


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """What --json printed: one document, and nothing else on standard output."""
        return json.loads(self.out)


Autofit = Callable[..., Done]


@pytest.fixture
def store_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store for commands that name none; it does not exist yet."""
    path = tmp_path / "store.db"
    monkeypatch.setenv("AUTOFIT_STORE", str(path))
    return path


@pytest.fixture
def filled(store_file: Path) -> Path:
    """The same store, with hand-made trials in it."""
    put(store_file, filled=True)
    return store_file


@pytest.fixture
def autofit(
    store_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Autofit:
    """Runs `autofit` in an empty folder, with several arguments or with one text that is split as a shell does."""
    # What else runs beside the tests is not to repeat their trials.
    monkeypatch.setattr(DeviceState, "doubts", lambda state, hardware: ())
    monkeypatch.chdir(tmp_path)
    return lambda *words: Done(*run_here(words if len(words) > 1 else shlex.split(words[0]), capfd))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Workers without a device."""
    return World.in_place_of_workers(monkeypatch)
