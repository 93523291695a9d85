"""A store with hand-made trials, and one that was predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from unit.operations.made_trials import HARDWARE, fits, make_job, make_trial

from autofit.core.prediction import Prediction
from autofit.core.units import GIB
from autofit.store import Store
from tests.made_stores import put

PREDICTION = Prediction(
    peak_allocated_bytes=5 * GIB, device_bytes=6 * GIB, step_seconds=0.5, calibrated_on=3, relative_error=0.1
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Ten trials without a prediction, and an eleventh with one."""
    put(tmp_path / "store.db", filled=True)
    with Store.open(str(tmp_path / "store.db")) as opened:
        opened.add(replace(make_trial({"method": "lora", "micro_batch": 2}, fits(6, 2400)), prediction=PREDICTION))
        yield opened


@pytest.fixture
def emulated(store: Store) -> Store:
    """The same store, with a trial on a card that is not there."""
    job = make_job(hardware=replace(HARDWARE, name="emulated-h100-80g", device_name="emulated"))
    store.add(make_trial({"method": "full", "micro_batch": 1}, fits(12, 1500), job=job))
    return store
