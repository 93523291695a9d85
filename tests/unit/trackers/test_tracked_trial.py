"""What trackers are told: the same of the same trial in any store, and nothing that should stay here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from unit.operations.made_trials import MADE, fits, make_trial, out_of_memory

from autofit import operations
from autofit.core.errors import NotMeasured, UsageError
from autofit.core.units import GIB
from autofit.store import Store, export_lines, import_lines
from autofit.trackers.tracked_trial import TrackedTrial


def test_a_trial_is_the_same_in_another_store(store: Store, tmp_path: Path) -> None:
    ours = store.trials()
    with Store.open(str(tmp_path / "other.db")) as other:
        other.add(make_trial({"method": "full", "micro_batch": 8}, fits(70, 5000)))  # so that the numbers differ
        import_lines(other, export_lines(store))
        theirs = other.trials()[1:]
    assert [TrackedTrial(t).uid for t in ours] == [TrackedTrial(t).uid for t in theirs]
    assert len({TrackedTrial(t).uid for t in ours}) == len(MADE) + 1


def test_a_context_is_readable_and_short_enough(emulated: Store) -> None:
    names = list(dict.fromkeys(TrackedTrial(trial).context for trial in emulated.trials()))
    assert [name.rpartition(" [")[0] for name in names] == [
        f"smollm2-135m on {card}, seq-len 128, batch 4, torch 2.13.0" for card in ("h100-80g", "emulated-h100-80g")
    ]
    trial = emulated.trials()[0]
    trial = replace(trial, workload=replace(trial.workload, model="x" * 300))
    assert len(TrackedTrial(trial).context) <= 128


def test_a_command_stays_here(store: Store) -> None:
    trial = store.trials()[0]
    tracked = TrackedTrial(
        replace(trial, workload=replace(trial.workload, program="train --token secret {micro_batch}"))
    )
    assert "secret" not in str([tracked.setting, tracked.facts, tracked.axes, tracked.context])


def test_metrics_of_each_kind_of_trial(store: Store) -> None:
    predicted = TrackedTrial(store.trials()[-1]).metrics
    assert predicted["predicted/tokens_per_second"] == 1024.0  # 4 sequences of 128 tokens in half a second
    assert (predicted["predicted/device_bytes"], predicted["device_bytes"]) == (6 * GIB, 6 * GIB)
    assert {name for name in predicted if name.startswith("phase")} == {
        f"phase_peak_bytes/{phase}" for phase in ("forward", "backward", "optimizer")
    }
    failed = TrackedTrial(make_trial({"method": "full"}, out_of_memory()))
    assert failed.metrics == {"requested_bytes": 2 * GIB, "trial_seconds": 7.5, "memory_limit_bytes": 80 * GIB}
    assert (failed.facts["outcome"], failed.facts["phase"]) == ("out_of_memory", "backward")


def test_what_is_not_there_is_said(store: Store, tmp_path: Path) -> None:
    journal = tmp_path / "journal.log"
    with pytest.raises(UsageError, match="did you mean smollm2-135m"):
        operations.track("optuna", model="smollm2", out=journal, store=store)
    with pytest.raises(UsageError, match="valid: h100-80g"):
        operations.track("optuna", hardware="abacus", out=journal, store=store)
    with pytest.raises(UsageError, match="unknown tracker 'mlfow': did you mean mlflow"):
        operations.track("mlfow", store=store)
    with Store.open(str(tmp_path / "empty.db")) as empty, pytest.raises(NotMeasured):
        operations.track("optuna", out=journal, store=empty)
    assert not journal.exists()
