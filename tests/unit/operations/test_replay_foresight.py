"""What a replayed search foresees: the estimator's word, corrected by no trial of its own table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from unit.operations.made_trials import STACK, fits
from unit.search.conftest import MACHINE
from unit.search.made_tables import lines_of, write
from unit.search.made_truth import Truth, cpu_lattice, make_job

from autofit.catalog.models import load
from autofit.lattice import Config
from autofit.operations import replay_foresight
from autofit.operations.recorded_tables import RecordedTable, read_whole
from autofit.operations.replay_foresight import ReplayForesight
from autofit.store import Store
from autofit.trial.site import installed_stack
from autofit.units import GIB

LIMIT = 3 * GIB // 2
SLOWER, HEAVIER = 3.0, 1.04


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_foresight, "installed_stack", lambda: replace(installed_stack(), cuda=None))


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
    return read_whole(write(file, lines_of(truth.trial(config, LIMIT) for config in configs)))


def foresight_over(*tables: RecordedTable, store: Path) -> ReplayForesight:
    return ReplayForesight(tables, store=str(store), report=lambda line: None)


def test_cold_predictions_are_of_the_estimator_and_of_no_trial(
    truth: Truth, configs: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they are must not hang on trials in the store that keeps the estimates."""
    table, store = table_of(truth, configs[:1], tmp_path / "one.jsonl"), tmp_path / "store.db"
    first = foresight_over(table, store=store).cold(table)
    assert set(first.predictions) == {trial.config for trial in table.trials}
    assert all(p.device_bytes > 0 and p.calibrated_on == 0 for p in first.predictions.values())
    with Store.open(str(store)) as opened:
        for trial in table.trials:
            opened.add(replace(trial, stack=installed_stack(), prediction=first.predictions[trial.config]))
    monkeypatch.setattr("autofit.estimate.sweep.sweep", lambda *asked, **options: pytest.fail("estimated twice"))
    assert foresight_over(table, store=store).cold(table).predictions == first.predictions


def off(table: RecordedTable, foresight: ReplayForesight) -> RecordedTable:
    """A table whose trials were all slower and heavier than predicted, by the same factors."""
    predictions = foresight.cold(table).predictions
    tokens = table.workload.tokens_per_step
    trials = []
    for trial in table.trials:
        prediction = predictions[trial.config]
        assert prediction.step_seconds is not None
        speed = tokens / (SLOWER * prediction.step_seconds)
        outcome = fits(HEAVIER * prediction.device_bytes / GIB, speed, tokens=tokens)
        trials.append(replace(trial, outcome=outcome))
    return replace(table, trials=tuple(trials))


def test_warm_predictions_are_corrected_by_the_other_tables_alone(
    truth: Truth, configs: list[Config], tmp_path: Path
) -> None:
    one, other = (table_of(truth, [c], tmp_path / f"{n}.jsonl") for n, c in zip(("one", "other"), configs, strict=True))
    cold = foresight_over(one, other, store=tmp_path / "store.db")
    before = cold.cold(one)
    slow = off(other, cold)
    warm = foresight_over(one, slow, store=tmp_path / "store.db")
    after = warm.warm(one)
    assert after is not None
    config = configs[0]
    seconds = [f.predictions[config].step_seconds for f in (before, after)]
    assert seconds[0] is not None and seconds[1] == pytest.approx(SLOWER * seconds[0], rel=0.01)
    assert after.predictions[config].device_bytes == before.predictions[config].device_bytes
    assert 0.0 < after.memory_error.intercept < 0.04 < after.memory_error.intercept_spread
    # Its own trials say nothing, whatever they are.
    same = foresight_over(off(one, cold), slow, store=tmp_path / "store.db")
    assert same.warm(same._tables[0]) == after
