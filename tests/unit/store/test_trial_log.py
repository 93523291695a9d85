"""Where a search's trials go when the store does not answer."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

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
    for content, stays in ((whole + '{"config": {"met', True), (whole, False), ("no trial\n", True)):
        file.write_text(content)
        import_rescued(store)
        left = list(tmp_path.glob(f"{RESCUED}*"))
        assert (store.count(), [path.read_text() for path in left]) == (1, [content] * stays)
        import_rescued(store)
        assert list(tmp_path.glob(f"{RESCUED}*")) == left, "under the name that was said"
        for path in left:
            path.unlink()
    assert f"{left[0].name} stays: line 1 cannot be imported" in caplog.text


def rescuing(store: Store) -> StoredTrials:
    """The log of a search whose store has failed for good."""
    log = StoredTrials(store, submit(store, a_trial()))
    log._failure = StoreError("the store cannot be reached", remedy="wait")
    return log


@contextmanager
def room_for(most_bytes: int) -> Iterator[None]:
    """A disk that is full once a file has so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_without_room_for_a_first_line_leaves_no_file(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = rescuing(store)
    with room_for(10):
        log.keep(a_trial())
    assert "import this line" in caplog.text and not list(tmp_path.rglob(f"{RESCUED}*"))
    caplog.clear()
    Path(f"{RESCUED}{log._search_id}.jsonl").touch()
    import_rescued(store)
    assert not caplog.text and not list(tmp_path.rglob(f"{RESCUED}*"))


def test_what_a_full_disk_leaves_of_a_line_spoils_no_other(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    log, trials = rescuing(store), [a_trial(config=complete({"micro_batch": size})) for size in (1, 2, 4)]
    log.keep(trials[0])
    assert log._file is not None
    with room_for(log._file.stat().st_size + 100):
        log.keep(trials[1])
    assert f"import this line: {line_of(trials[1])}" in caplog.text
    log.keep(trials[2])
    import_rescued(store)
    assert store.trials() == [trials[0], trials[2]]


def test_what_is_rescued_while_a_file_is_removed_is_not_lost(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log, trials = rescuing(store), [a_trial(config=complete({"micro_batch": size})) for size in (1, 2)]
    log.keep(trials[0])
    unlink = Path.unlink

    def too_late(path: Path) -> None:
        log.keep(trials[1])
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", too_late)
        import_rescued(store)
    import_rescued(store)
    assert store.trials() == trials and not list(tmp_path.glob(f"{RESCUED}*"))


def test_what_is_rescued_as_its_file_is_imported_is_not_lost(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log, trials = rescuing(store), [a_trial(config=complete({"micro_batch": size})) for size in (1, 2)]
    log.keep(trials[0])
    with monkeypatch.context() as patch:
        opened = Path.open

        def too_late(path: Path, *arguments: Any, **options: Any) -> IO[Any]:
            patch.undo()
            import_rescued(store)
            return opened(path, *arguments, **options)

        patch.setattr(Path, "open", too_late)
        log.keep(trials[1])
    import_rescued(store)
    assert store.trials() == trials and not list(tmp_path.glob(f"{RESCUED}*"))
