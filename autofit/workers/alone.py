"""Whether another process of this user runs trials on the same cores, which would distort the timings of both."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)
_held: list[int] = []
"""The lock that this process holds; it is released when the process ends."""


def warn_unless_alone() -> None:
    """Warn in one line if another process has claimed this machine's cores for trials; otherwise claim them.

    This is not an error: memory is measured correctly alongside others, and a user may know that they do not matter.
    """
    if _held:
        return
    try:
        lock = os.open(_file(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return  # having no place for a lock is no reason not to run trials
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        _log.warning("autofit: another process is running trials on this machine: each slows down the other's")
        return
    _held.append(lock)


def _file() -> Path:
    return Path(tempfile.gettempdir()) / f"autofit-timing-{os.getuid()}.lock"
