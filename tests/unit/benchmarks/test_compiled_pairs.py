"""Compiled configs beside the same without compilation: what is paired, and what is said of them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from unit.operations.made_trials import fits, make_trial, out_of_memory

from autofit.outcome import Trial
from autofit.space import load
from autofit.techniques import AXES
from autofit.units import GIB

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("compiled_pairs")


def test_the_space_has_six_pairs(script: ModuleType) -> None:
    configs = load(str(BENCHMARKS / "compiled_pairs.yaml"), AXES).configs(AXES, batch=4)
    trials = [make_trial(config, fits(1, 1)) for config in configs]
    pairs = script.pairs_of(trials)
    assert len(pairs) == 6 and len(trials) == 12
    for plain, compiled in pairs:
        assert plain.config.replace(compile=True) == compiled.config != plain.config


def row(script: ModuleType, trial: Trial) -> Any:
    """The trial beside a prediction of 10 GiB and half a second."""
    guessed = SimpleNamespace(device_bytes=10 * GIB, step_seconds=0.5)
    return script.Row(trial=trial, guessed=guessed, calibrated=guessed)


def test_what_is_stated_is_the_range_of_what_was_measured(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "compared", lambda trials: [row(script, trial) for trial in trials])
    trials = [
        make_trial({"micro_batch": micro_batch, "compile": compiled}, outcome)
        for micro_batch, compiled, outcome in (
            (1, False, fits(10, 512)),
            (1, True, fits(8, 1024)),
            (2, False, fits(11, 1024)),
            (2, True, fits(12, 819.2)),
            (4, False, fits(20, 512)),
            (4, True, out_of_memory()),
        )
    ]
    found = json.loads(json.dumps(script.document_of(trials)))
    assert found["not_trained"] == 1 and len(found["pairs"]) == 2
    assert found["ranges"]["memory"] == {"least": 0.8, "median": 1.0, "most": 1.2}
    assert found["ranges"]["time"] == pytest.approx({"least": 1.0, "median": 1.125, "most": 1.25})
    assert script.stated(found) == (
        "of 2 configs trained on a GPU with compilation, memory was 0.80 to 1.20 times the predicted, and a step took "
        "0.50 to 1.25 times as long as without it"
    )
    assert "with over without  0.50" in script.text(found["pairs"][0])
