"""What a replayed search foresees: the estimator's word, corrected by no trial of its own table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from unit.bench.made_tables import lines_of, write
from unit.operations.made_trials import STACK
from unit.search.conftest import MACHINE
from unit.search.made_truth import Truth, cpu_lattice, make_job

from autofit.bench import tables
from autofit.bench.tables import predictions_of
from autofit.catalog.models import load
from autofit.core.lattice import Config
from autofit.core.units import GIB
from autofit.estimate import sweep
from autofit.operations.recording.table_file import RecordedTable, read_table
from autofit.store import Store
from autofit.trial.machine.detection import installed_stack

LIMIT = 3 * GIB // 2


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "installed_stack", lambda: replace(installed_stack(), cuda=None))


@pytest.fixture(scope="module")
def truth() -> Truth:
    """A world of the space `cpu`."""
    job = make_job(MACHINE, STACK, model=load("smollm2-135m"))
    return Truth(job, cpu_lattice(job), seed=0)


@pytest.fixture
def configs(truth: Truth) -> list[Config]:
    """Two of them."""
    return [c for c in truth.lattice.configs if c["method"] == "lora" and c["micro_batch"] == 1][:2]


def table_of(truth: Truth, configs: Iterable[Config], file: Path) -> RecordedTable:
    return read_table(write(file, lines_of(truth.trial(config, LIMIT) for config in configs)), whole=True)


def test_cold_predictions_are_of_the_estimator_and_of_no_trial(
    truth: Truth, configs: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they are must not hang on trials in the store that keeps the estimates."""
    table, store = table_of(truth, configs[:1], tmp_path / "one.jsonl"), tmp_path / "store.db"
    first = predictions_of(table, store=str(store))
    assert set(first.by_config) == {trial.config for trial in table.trials}
    assert all(p.device_bytes > 0 and p.calibrated_on == 0 for p in first.by_config.values())
    with Store.open(str(store)) as opened:
        for trial in table.trials:
            opened.add(replace(trial, stack=installed_stack(), prediction=first.by_config[trial.config]))
    monkeypatch.setattr(sweep, "sweep", lambda *asked, **options: pytest.fail("estimated twice"))
    assert predictions_of(table, store=str(store)).by_config == first.by_config
