"""The replays under many limits: which limits these are, and what a row of the table counts."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from unit.operations.made_trials import fits as fits_in
from unit.operations.made_trials import make_job, make_trial
from unit.search.made_tables import lines_of, write

from autofit.operations.replay_problems import Tables
from autofit.outcome import Fits
from autofit.units import GIB

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("replay_limits")


def test_limits_rise_evenly_to_the_tables_own(script: ModuleType, tmp_path: Path) -> None:
    job = make_job()
    made = [make_trial({"rank": rank, "method": "lora"}, fits_in(rank / 8, 10), job=job) for rank in (8, 16, 24, 32)]
    (recorded,) = Tables(files=(write(tmp_path / "t.jsonl", lines_of(made)),)).problems()
    own = recorded.problem.memory_limit_bytes
    found = script.lowered(recorded, 4)
    limits = [one.problem.memory_limit_bytes for one in found]
    assert limits == [GIB + round((own - GIB) * part / 4) for part in (1, 2, 3, 4)]
    for one, limit in zip(found, limits, strict=True):
        fitting = [t.outcome.measurement.device_bytes for t in one.trials.values() if isinstance(t.outcome, Fits)]
        assert fitting == [size * GIB for size in (1, 2, 3, 4) if size * GIB <= limit]


def figure(trials: float | None, ran_out: float, slower: float | None, held: int, later: float = 0) -> dict[str, Any]:
    return {
        "trials": {"median": trials},
        "out_of_memory": {"median": ran_out},
        "ended": {
            "stated": {"median": 0.1},
            "within_stated": held,
            "seeds": 5,
            "recommended": {"median": slower},
            "out_of_memory": {"median": ran_out + later},
        },
    }


def test_a_row_counts_limits_and_searches(script: ModuleType) -> None:
    found = [figure(8, 1, 0.0, 5), figure(9, 0, 0.02, 5), figure(None, 2, 0.3, 4)]
    assert script._row(found) == ("1 of 3 limits", "2 of 3 limits", "14 of 15", "2.0%", "30.0%")
    assert script._row([*found, figure(1, 0, None, 5)])[3:] == ("16.0%", "never")
    assert script._row([figure(1, 1, 0.0, 5, later=1)])[1] == "0 of 1 limits", (
        "what runs out after the best counts, too"
    )
    assert script._row([{**figure(1, 0, 0.0, 5), "ended": None}]) == (
        "1 of 1 limits",
        "1 of 1 limits",
        "0 of 0",
        "-",
        "-",
    )
