"""The estimator's own time: what misses its target is named, and the exit status says so. Nothing is timed here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("estimator_time")


WITHIN = {"new_seconds": 2.0, "known_seconds": 0.02, "cold_seconds": 60.0, "warm_seconds": 2.0, "peak_mib": 2048.0}


@pytest.mark.parametrize(
    ("model", "changed", "missed"),
    [
        ("llama-3.1-8b", {}, []),
        ("llama-3.1-8b", {"warm_seconds": 2.1}, ["llama-3.1-8b: warm_seconds is 2.1, at most 2 is asked"]),
        ("llama-3.1-70b", {"warm_seconds": 4.0, "cold_seconds": 120.0}, []),
        ("llama-3.1-70b", {"known_seconds": 0.05}, ["llama-3.1-70b: known_seconds is 0.05, at most 0.04 is asked"]),
        ("llama-3.1-70b", {"peak_mib": 3000.0}, ["llama-3.1-70b: peak_mib is 3000, at most 2048 is asked"]),
    ],
)
def test_what_misses_its_target_is_named_and_decides_the_exit_status(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    changed: dict[str, float],
    missed: list[str],
) -> None:
    def measured(name: str, hardware: str) -> dict[str, Any]:
        return {"model": name, "worst": WITHIN | changed}

    monkeypatch.setattr(script, "measured", measured)
    monkeypatch.setattr(sys, "argv", ["estimator_time.py", "--model", model])
    assert script.main() == bool(missed)
    assert capsys.readouterr().out.splitlines()[len(WITHIN) :] == (missed or ["all targets are reached"])
