"""`autofit trial` for real: one config of a tiny model, run in a child and told as the design says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import tiny_model
from unit.cli.conftest import Autofit

from autofit.store import Store

KEYS = {"outcome", "config", "hardware", "stack", "workload"}
KEYS_BESIDES = {"memory_limit_bytes", "seconds", "recorded_at", "trial_id"}
MEASUREMENT_KEYS = {
    *("tokens_per_second", "step_seconds", "mfu", "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes"),
    *("host_peak_bytes", "phase_peaks", "loss", "steps", "setup_seconds"),
}


@pytest.fixture
def workload(tmp_path: Path) -> tuple[str, ...]:
    """The workload options of a model whose step takes a moment."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(tiny_model().config))
    return ("--model", "./tiny", "--seq-len", "32", "--global-batch", "4", "--device", "cpu")


def test_a_trial_that_fits(autofit: Autofit, store_file: Path, workload: tuple[str, ...]) -> None:
    done = autofit("trial", *workload, "--config", "micro_batch=2,precision=bf16", "--memory-limit", "2GiB", "--json")
    assert done.code == 0, done.err
    trial = done.document
    assert set(trial) == KEYS | KEYS_BESIDES | {"measurement"}
    assert set(trial["measurement"]) >= MEASUREMENT_KEYS
    assert (trial["outcome"], trial["workload"]["model"]) == ("fits", "tiny")
    assert (trial["config"]["micro_batch"], trial["config"]["method"]) == (2, "full")
    measured = trial["measurement"]
    assert set(measured["phase_peaks"]) == {"forward", "backward", "optimizer"}
    assert measured["tokens_per_second"] == pytest.approx(128 / measured["step_seconds"]["median"], rel=1e-3)
    assert measured["loss"]["first"] == pytest.approx(6.24, abs=0.3)  # ln 512: nothing is learnt yet
    with Store.open(str(store_file)) as store:
        stored = store.trial(trial["trial_id"])
    assert stored is not None and json.loads(json.dumps(stored.to_json())) == trial


def test_a_trial_that_runs_out_of_memory(autofit: Autofit, store_file: Path, workload: tuple[str, ...]) -> None:
    done = autofit("trial", *workload, "--config", "method=full", "--memory-limit", "1MiB", "--json")
    assert done.code == 3, done.err
    trial = done.document
    assert trial["outcome"] == "out_of_memory"
    assert set(trial) == KEYS | KEYS_BESIDES | {"reason", "phase", "requested_bytes", "signal", "host"}
    assert trial["reason"]
    with Store.open(str(store_file)) as store:
        assert store.count(outcome="out_of_memory") == 1


def test_a_trial_beyond_its_deadline(autofit: Autofit, store_file: Path, workload: tuple[str, ...]) -> None:
    done = autofit("trial", *workload, "--config", "method=full", "--deadline", "50ms")
    assert done.code == 3, done.err
    assert "timed out: " in done.out
    with Store.open(str(store_file)) as store:
        assert store.count(outcome="timed_out") == 1
