"""Whether another process of this user runs trials on the same cores: both would be timed wrongly."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)
_held: list[int] = []
"""The lock that this process has; it goes with the process."""


def warn_unless_alone() -> None:
    """Say in a line where another process has said that it runs trials on this machine's cores, or say it oneself.

    It is no error: memory is measured rightly beside others, and a user may know that they do not matter.
    """
    if _held:
        return
    try:
        lock = os.open(_file(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return  # no place for a lock is no reason to run no trial
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        _log.warning(
            "autofit: another process runs trials on this machine: each makes the other's slower than they are"
        )
        return
    _held.append(lock)


def _file() -> Path:
    return Path(tempfile.gettempdir()) / f"autofit-timing-{os.getuid()}.lock"
