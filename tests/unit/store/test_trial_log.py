"""Where a search's trials go when the store does not answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autofit.core.errors import StoreError
from autofit.core.outcome import Trial
from autofit.store import Store
from autofit.store.trial_log import StoredTrials


def test_a_trial_whose_commit_was_not_answered_is_stored_once(
    store: Store, make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    log, trials = StoredTrials(store), [make_trial(), make_trial()]
    kept = [log.keep(trial) for trial in trials]
    assert store.trials() == trials
    assert [trial.trial_id for trial in store.trials()] == [trial.trial_id for trial in kept]
    log.check()
