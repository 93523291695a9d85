"""A lock per device: trials of different processes and users of one machine exclude each other on it.

A lock is a file that the kernel unlocks when its holder dies, in a folder that every user of the machine can write.
Containers with folders of their own do not see each other's.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from autofit.core.units import format_duration
from autofit.trial.machine import nvml

FOLDER_VARIABLE = "AUTOFIT_LOCKS"
"""The environment variable that names the folder of the locks."""
POLL_SECONDS = 0.2

Waiting = Callable[[int | None], object]
"""Called once when a lock is held by another process, with that process's number if it is known."""
_log = logging.getLogger(__name__)
NOT_BEGUN = "not begun"
"""How the reason for a wait in vain begins."""


class GivenUp(Exception):
    """A lock was not free in the time that it was worth waiting for."""


def names(kind: str, ranks: int = 1) -> list[str]:
    """Names of the locks of the first `ranks` visible devices of a kind. The CPU counts as one device, whatever part of
    it a trial uses; so do all devices that NVML does not know."""
    if kind == "cpu":
        return ["cpu"]
    cards = [card.uuid for number in range(ranks) if (card := nvml.visible(number)) is not None]
    return cards or [kind]


@contextmanager
def held(
    devices: Sequence[str],
    *,
    waiting: Waiting = lambda holder: None,
    unwanted: Callable[[], bool] = lambda: False,
    most_seconds: float = math.inf,
) -> Iterator[float]:
    """Hold the locks of `devices`; gives the seconds that it had to wait for them. Ends when its process ends, at the
    latest.

    They are taken in the order of their names, so that no two processes wait for each other. Not for a thread that
    holds one of them already. Raises `GivenUp` once `unwanted` says so while it waits, or after `most_seconds`.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        for device in sorted(set(devices)):
            lock = _open_lock(device)
            if lock is not None:
                stack.callback(_release, lock)
                _take(lock, waiting, unwanted, started + most_seconds)
        yield time.monotonic() - started


def _take(lock: int, waiting: Waiting, unwanted: Callable[[], bool], until: float) -> None:
    started, has_reported = time.monotonic(), False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if unwanted():
                raise GivenUp(f"{NOT_BEGUN}: stopped while it waited for its device") from None
            if time.monotonic() >= until:
                waited = format_duration(time.monotonic() - started)
                raise GivenUp(f"{NOT_BEGUN}: another autofit process used the device for all of {waited}") from None
            if not has_reported:
                has_reported = True
                holder = os.pread(lock, 20, 0)
                waiting(int(holder) if holder.isdigit() else None)
            time.sleep(POLL_SECONDS)
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)


def _release(lock: int) -> None:
    # Explicitly: a process forked meanwhile would keep the lock with its copy of the descriptor.
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _open_lock(device: str) -> int | None:
    """A descriptor of the device's lock file, which every user may write; None with a warning where it cannot be
    opened: trials run all the same."""
    folder = Path(os.environ.get(FOLDER_VARIABLE) or "/tmp")  # not the user's folder: others must see it
    file = folder / f"autofit-{re.sub(r'[^A-Za-z0-9.-]', '_', device)}.lock"
    try:
        return _open_file(file)
    except OSError as error:
        _warn_of_no_lock(folder, error.strerror or str(error))
        return None


@cache
def _warn_of_no_lock(folder: Path, reason: str) -> None:
    _log.warning("autofit: trials of other processes may run at the same time: no lock in %s (%s)", folder, reason)


def _open_file(file: Path) -> int:
    """A descriptor of a lock file, created if it does not exist. Raises `OSError`."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        # First without O_CREAT: Linux refuses that for another user's file in a sticky folder (fs.protected_regular).
        with suppress(FileNotFoundError):
            return os.open(file, flags)
        with suppress(FileExistsError):  # another process was faster
            descriptor = os.open(file, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(descriptor, 0o666)  # whatever the umask
            return descriptor
