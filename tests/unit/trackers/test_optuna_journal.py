"""The journal, read back by Optuna itself and, where it is installed, by its dashboard."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from unit.cli.conftest import Autofit, autofit, store_file
from unit.operations.made_trials import MADE, fits, make_trial

from autofit import operations
from autofit.core.errors import UsageError
from autofit.core.units import GIB
from autofit.store import Store

__all__ = ["autofit", "store_file"]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal.log"


def studies(journal: Path) -> list[optuna.Study]:
    """What a reader finds there that has not written it."""
    storage = JournalStorage(JournalFileBackend(str(journal)))
    return [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]


def test_optuna_reads_every_trial(store: Store, journal: Path) -> None:
    done = operations.track("optuna", out=journal, store=store)
    assert (done.trials, done.added) == (len(MADE) + 1, len(MADE) + 1)
    (study,) = studies(journal)
    assert [direction.name for direction in study.directions] == ["MINIMIZE", "MAXIMIZE"]
    assert study.metric_names == ["device_bytes", "tokens_per_second"]
    assert study.user_attrs["hardware"]["name"] == "h100-80g"
    for trial, stored in zip(study.trials, store.trials(), strict=True):
        config = {name: value for name, value in trial.params.items() if value != "-"}
        assert config == stored.config.to_json()
        assert (trial.state == TrialState.COMPLETE) == (stored.measurement is not None)
        assert trial.duration is not None and trial.duration.total_seconds() == stored.seconds
        assert trial.user_attrs["trial_id"] == stored.trial_id
        if stored.measurement is not None:
            assert trial.values == [stored.measurement.device_bytes, stored.measurement.tokens_per_second]
    reasons = {t.user_attrs["outcome"]: t.user_attrs["reason"] for t in study.get_trials(states=(TrialState.FAIL,))}
    assert reasons == {"out_of_memory": "tried to allocate 2.00 GiB", "crashed": "killed by SIGSEGV"}


def test_optunas_best_trials_are_the_frontier(store: Store, journal: Path) -> None:
    operations.track("optuna", out=journal, store=store)
    best = {trial.values[0] / GIB for trial in studies(journal)[0].best_trials}
    assert best == {2, 3, 6, 8, 40}


def test_only_what_is_new_is_added(store: Store, journal: Path) -> None:
    operations.track("optuna", out=journal, store=store)
    before = journal.read_bytes()
    assert operations.track("optuna", out=journal, store=store).added == 0
    assert journal.read_bytes() == before
    store.add(make_trial({"method": "lora", "micro_batch": 1, "rank": 24}, fits(5, 800)))
    assert operations.track("optuna", out=journal, store=store).added == 1
    assert journal.read_bytes().startswith(before)
    assert studies(journal)[0].trials[-1].params["rank"] == 24


def test_a_study_per_context_and_none_of_what_is_not_asked_for(emulated: Store, journal: Path) -> None:
    done = operations.track("optuna", hardware="emulated-h100-80g", out=journal, store=emulated)
    assert (done.trials, done.added) == (1, 1)
    (study,) = studies(journal)
    assert "on emulated-h100-80g," in study.study_name
    assert operations.track("optuna", out=journal, store=emulated).added == len(MADE) + 1
    assert len(studies(journal)) == 2


def test_the_search_space_is_one_for_all_trials(store: Store, journal: Path) -> None:
    """Plots and importances leave out a parameter whose choices differ."""
    operations.track("optuna", out=journal, store=store)
    (study,) = studies(journal)
    space = optuna.search_space.intersection_search_space(study.trials)
    assert space.keys() == study.trials[0].params.keys() >= {"rank", "micro_batch", "checkpointing"}


@pytest.mark.parametrize("text", ["notes\n", '{"schema": 1}\n', "[1]\n"])
def test_another_file_is_left_alone(store: Store, journal: Path, text: str) -> None:
    journal.write_text(text)
    with pytest.raises(UsageError, match="is no journal of Optuna"):
        operations.track("optuna", out=journal, store=store)
    assert journal.read_text() == text


def test_the_dashboard_opens_it(store: Store, journal: Path) -> None:
    loader = pytest.importorskip("optuna_dashboard._storage_url")
    server = pytest.importorskip("optuna_dashboard._app")
    operations.track("optuna", out=journal, store=store)
    app = server.create_app(loader.get_storage(str(journal)))
    sent: list[str] = []
    request = {"PATH_INFO": "/api/studies/0", "REQUEST_METHOD": "GET", "QUERY_STRING": ""}
    body = b"".join(app(request, lambda status, headers, *more: sent.append(status)))
    assert sent == ["200 OK"]
    assert body.count(b'"trial_id"') >= len(MADE) + 1


def test_the_command_says_what_is_new(store: Store, autofit: Autofit) -> None:
    for new in (11, 0):
        done = autofit("track", "optuna", "--model", "smollm2-135m", "--out", "team.log")
        assert (done.code, done.out.splitlines()) == (
            0,
            [f"11 trials in the journal team.log: {new} new", "`optuna-dashboard team.log` shows them"],
        )
