"""Runs in a real MLflow, on a database in a file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from unit.operations.made_trials import MADE, fits, make_trial

from autofit import operations
from autofit.core.errors import EnvironmentLacks
from autofit.core.units import GIB
from autofit.store import Store

with warnings.catch_warnings(action="ignore"):  # of what it imports
    mlflow = pytest.importorskip("mlflow", reason="pip install 'autofit-llm[trackers]'")

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return mlflow.MlflowClient()


def runs(client: Any) -> list[Any]:
    experiments = [e.experiment_id for e in client.search_experiments(filter_string="name != 'Default'")]
    return list(client.search_runs(experiments, order_by=["attributes.start_time ASC"]))


def test_a_run_is_a_trial(store: Store, client: Any, tmp_path: Path) -> None:
    done = operations.track("mlflow", store=store)
    assert (done.place, done.added) == (f"MLflow at sqlite:///{tmp_path}/mlflow.db", len(MADE) + 1)
    by_number = {int(run.data.tags["autofit.trial_id"]): run for run in runs(client)}
    for trial in store.trials():
        run = by_number.pop(trial.trial_id or 0)
        assert run.data.params == {name: str(value) for name, value in trial.config.to_json().items()}
        assert run.info.status == ("FINISHED" if trial.measurement else "FAILED")
        assert run.info.end_time - run.info.start_time == 7500
        assert run.data.tags["hardware/name"] == "h100-80g"
        assert run.data.tags["autofit.outcome"] == trial.outcome.kind
        if trial.measurement:
            assert run.data.metrics["tokens_per_second"] == trial.measurement.tokens_per_second
            assert run.data.metrics["phase_peak_bytes/backward"] == trial.measurement.phase_peaks["backward"]
        else:
            assert run.data.tags["autofit.reason"] == getattr(trial.outcome, "reason")  # noqa: B009
    assert not by_number
    assert runs(client)[-1].data.metrics["predicted/device_bytes"] == 6 * GIB


def test_only_what_is_new_is_added(store: Store, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    operations.track("mlflow", store=store)
    assert operations.track("mlflow", store=store).added == 0
    store.add(make_trial({"method": "lora", "micro_batch": 1}, fits(5, 800)))

    def cut(self: Any, *given: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(mlflow.MlflowClient, "log_batch", cut)
        operations.track("mlflow", store=store)
    assert len(runs(client)) == len(MADE) + 1
    assert operations.track("mlflow", store=store).added == 1
    assert len(runs(client)) == len(MADE) + 2


def test_an_experiment_per_context(emulated: Store, client: Any) -> None:
    operations.track("mlflow", store=emulated)
    names = {e.name.partition(",")[0] for e in client.search_experiments(filter_string="name != 'Default'")}
    assert names == {"smollm2-135m on h100-80g", "smollm2-135m on emulated-h100-80g"}


def test_an_experiment_that_was_deleted_is_to_be_restored(store: Store, client: Any) -> None:
    operations.track("mlflow", store=store)
    (deleted,) = client.search_experiments(filter_string="name != 'Default'")
    client.delete_experiment(deleted.experiment_id)
    with pytest.raises(EnvironmentLacks, match=f"mlflow experiments restore -x {deleted.experiment_id}") as raised:
        operations.track("mlflow", store=store)
    assert "MLFLOW_TRACKING_URI" not in str(raised.value)


def test_a_server_that_is_not_there(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(EnvironmentLacks, match=r"MLflow at http://127\.0\.0\.1:9: .*MLFLOW_TRACKING_URI") as raised:
        operations.track("mlflow", store=store)
    assert "secret" not in str(raised.value)
