"""Where a search's trials go when the store does not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from leases import submit
from unit.store.conftest import a_trial, context, measured

from autofit.core.errors import StoreError
from autofit.core.outcome import Trial
from autofit.store import Store
from autofit.store.exchange import line_of, opening_line
from autofit.store.trial_log import RESCUED, StoredTrials, import_rescued
from autofit.techniques import complete


def test_a_trial_whose_commit_was_not_answered_is_stored_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.store.trial_log.PAUSE_SECONDS", 0.0)
    unanswered = [True, True]
    add = Store.add

    def lost(store: Store, trial: Trial, **options: Any) -> Trial:
        stored = add(store, trial, **options)
        if unanswered:
            unanswered.pop()
            raise StoreError("the store cannot be reached", remedy="wait")
        return stored

    monkeypatch.setattr(Store, "add", lost)
    log, trials = StoredTrials(store), [a_trial(), a_trial()]
    kept = [log.keep(trial) for trial in trials]
    assert store.trials() == trials
    assert [trial.trial_id for trial in store.trials()] == [trial.trial_id for trial in kept]
    log.check()


def test_a_trial_that_is_set_aside_stays_and_is_in_no_frontier(store: Store) -> None:
    """It is the only one of its config."""
    log = StoredTrials(store)
    configs = (complete({"method": "full", "micro_batch": size}) for size in (1, 2))
    slow, sound = (log.keep(a_trial(config=config, outcome=measured())) for config in configs)
    keys = {"hardware_key": slow.hardware.key, "workload_key": slow.workload.key}
    frontier_version, trials_version = store.version(**keys), store.version()
    log.set_aside(slow, "n1 is slow")
    assert store.version(**keys) != frontier_version, "who has remembered the frontier asks again"
    assert store.version() != trials_version, "and who has remembered the trials"
    kept, other = store.trials()
    assert kept == slow.set_aside("n1 is slow") and kept.doubts == ("n1 is slow",) and other == sound
    frontier = store.frontier(**context(slow))
    assert frontier is not None and [point.trial_id for point in frontier.points] == [sound.trial_id]


def test_a_torn_file_stays_and_what_is_whole_in_it_is_imported_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    file, whole = Path(f"{RESCUED}{submit(store, a_trial())}.jsonl"), opening_line() + line_of(a_trial())
    file.write_text(whole + '{"config": {"met')
    import_rescued(store)
    assert (store.count(), file.exists()) == (1, True)
    file.write_text(whole)
    import_rescued(store)
    assert (store.count(), file.exists()) == (1, False)
    file.write_text("no trial\n")
    import_rescued(store)
    assert file.exists() and "stays: line 1 cannot be imported" in caplog.text
