"""Where the trials of a search are kept: in the store or, if that fails, in a file that the next search imports."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from autofit.core.device.hardware import Hardware
from autofit.core.errors import AutofitError, StoreError
from autofit.core.lattice import Config
from autofit.core.outcome import Trial, context_keys
from autofit.store.database.failures import retried
from autofit.store.exchange import import_lines, line_of, opening_line
from autofit.store.searches.heartbeat import Heartbeat
from autofit.store.searches.lease import Lease
from autofit.store.store import Store
from autofit.techniques import Job

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
"""How long a failing store is retried: enough for a server to restart, or another process to end its transaction."""
PAUSE_SECONDS = 2.0
"""Pause between two tries."""
RESCUED = "autofit-unsaved-"
"""What the names of files begin with that hold what a store did not accept; a search's id follows."""

_log = logging.getLogger(__name__)


class TrialLog:
    """Where a search's trials go, and what earlier ones have shown. This one keeps nothing: a replay's."""

    def attempts(self, job: Job) -> dict[Config, list[Trial]]:
        """Earlier trials of the job's hardware, stack and workload, which may make new ones unnecessary."""
        return {}

    def keep(self, trial: Trial) -> Trial:
        """Keeps `trial` and returns it with its number, if it has got one."""
        return trial

    def set_aside(self, trial: Trial, reason: str) -> None:
        """Keeps a trial that was kept before as one that counts no longer (`Trial.set_aside`)."""

    def check(self) -> None:
        """Raises an error if trials can no longer be kept where they should be."""

    def between_executions(self, hardware: Hardware) -> float:
        """`repeatability.between_executions` of the hardware, as far as the trials kept here show it."""
        return 0.0


class StoredTrials(TrialLog):
    """Keeps each trial for good before returning. Once the store has failed for good, trials go only to the file."""

    def __init__(
        self, store: Store, search_id: str | None = None, *, fresh: bool = False, heartbeat: Heartbeat | None = None
    ) -> None:
        """`heartbeat` keeps the search's lease. `fresh`: only the trials of this search count as earlier ones."""
        self._store = store
        self._search_id = search_id
        self._heartbeat = heartbeat
        self._fresh = fresh
        self._file: Path | None = None
        self._failure: StoreError | None = None

    def attempts(self, job: Job) -> dict[Config, list[Trial]]:
        """The trials of this context that the store has."""
        context = context_keys(job.hardware, job.stack, job.workload)
        return self._store.attempts(**context, search_id=self._search_id if self._fresh else None)

    def between_executions(self, hardware: Hardware) -> float:
        """What the store's trials show (`repeatability.between_executions`)."""
        return self._store.between_executions(hardware.key)

    def keep(self, trial: Trial) -> Trial:
        """Keeps `trial` and returns it with its number, or without one if only the file has it; an interrupt meanwhile
        loses nothing. Raises `LeaseLost` if another driver has the search by now."""
        try:
            if self._failure is None:
                uid = uuid4().hex
                return _patiently(lambda: self._store.add(trial, lease=self._lease, uid=uid))
        except StoreError as error:
            self._failure = error
        except KeyboardInterrupt:
            self._write(trial)
            _log.warning("autofit: trials that the store did not accept are in %s", self._file)
            raise
        self._write(trial)
        return trial

    def set_aside(self, trial: Trial, reason: str) -> None:
        """Sets the trial aside in the store, so that its speed no longer counts for anybody. Raises `LeaseLost`."""
        if trial.trial_id is None or self._failure is not None:
            return
        try:
            _patiently(lambda: self._store.set_aside(trial, reason, lease=self._lease))
        except StoreError as error:
            self._failure = error

    @property
    def _lease(self) -> Lease | None:
        return None if self._heartbeat is None else self._heartbeat.lease

    def check(self) -> None:
        """Raises `StoreError`, naming the file, once the store has failed: a search must not go on without a store; and
        `LeaseLost` once another driver has the search, or it is cancelled."""
        if self._heartbeat is not None:
            self._heartbeat.check()
        if self._failure is not None:
            by_itself = "the next search here reads it, or: " if self._search_id else ""
            raise StoreError(
                f"{self._failure}; what was measured since then is in {self._file}",
                remedy=f"when the store works again, {by_itself}autofit db import {self._file}",
            )

    def _write(self, trial: Trial) -> None:
        name = f"{RESCUED}{self._search_id or 'trials'}.jsonl"
        for path in [self._file] if self._file is not None else [folder / name for folder in _folders(self._store)]:
            try:
                _append(path, line_of(trial))
            except OSError:
                continue
            self._file = path
            return
        # No folder can be written to: standard error is the last resort.
        _log.error("autofit: nothing can be written; import this line: %s", line_of(trial))


def import_rescued(store: Store) -> None:
    """Imports what this user's earlier searches of the store could not keep there, from the files that they have left
    on this machine, and removes these. One that cannot be read stays, under a name that is said."""
    for path in dict.fromkeys(path for folder in _folders(store) for path in folder.glob(f"{RESCUED}*.jsonl")):
        try:
            # Folders are shared: by other users, and by searches of other stores.
            search_id = path.stem.removeprefix(RESCUED).partition(".")[0]
            if path.stat().st_uid != os.getuid() or store.search(search_id) is None:
                continue
            if path.name == f"{RESCUED}{search_id}.jsonl":  # a search that goes on begins another file
                path = path.rename(path.with_name(f"{RESCUED}{search_id}.{uuid4().hex[:8]}.jsonl"))
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            # An empty file is what is left of a line for which there was no room.
            added = import_lines(store, whole.decode().splitlines()).added if content else 0
            if added:
                _log.warning("autofit: the store now has %d trials that it did not accept before", added)
            if path.stat().st_size == len(whole):  # else its search was adding to it, or was killed while it did
                path.unlink()
        except FileNotFoundError:
            continue  # another search has imported it
        except (AutofitError, OSError, ValueError) as error:
            _log.warning("autofit: %s stays: %s", path, error)


def _append(path: Path, line: str) -> None:
    """Adds a line to such a file. Raises `OSError`, and then leaves it as it was."""
    with path.open("ab", buffering=0) as file:  # a buffer would write what failed once more, when it is closed
        size = file.tell()
        rest = (("" if size else opening_line()) + line).encode()
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError):
                file.truncate(size)  # a part of a line, as a full disk leaves it, would spoil the next one
                if not size:
                    path.unlink()
            raise


def _folders(store: Store) -> list[Path]:
    """Where such a file may be: next to the store, else in the current folder, else in that for temporary files."""
    folders = [store.folder, Path(tempfile.gettempdir())]
    with suppress(FileNotFoundError):  # of a folder that was removed meanwhile
        folders.insert(1, Path.cwd())
    return [folder for folder in folders if folder is not None]


def _patiently(write: Callable[[], T]) -> T:
    return retried(
        write, lambda error: isinstance(error, StoreError), seconds=PATIENCE_SECONDS, pause_seconds=PAUSE_SECONDS
    )
