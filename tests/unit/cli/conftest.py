"""Runs the program in this process: arguments in, exit code and both output streams out."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from unit.operations.made_trials import fill
from unit.operations.made_world import World

from autofit.cli import main as program
from autofit.core.device.state import DeviceState
from autofit.store import Store


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
    with Store.open(str(store_file)) as store:
        fill(store)
    return store_file


@pytest.fixture
def autofit(
    store_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Autofit]:
    """Runs `autofit` with the arguments given, in an empty folder."""
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGHUP)}
    # What else runs beside the tests is not to repeat their trials.
    monkeypatch.setattr(DeviceState, "doubts", lambda state, hardware: ())
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["autofit", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            program.main()
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, out, err)

    yield run
    for kind, handler in before.items():
        signal.signal(kind, handler)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Workers without a device."""
    return World.in_place_of_workers(monkeypatch)
