"""A private Ray's folder for its sockets and logs, which is removed when its process is done with it or has died."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from autofit.core.errors import EnvironmentLacks


class PrivateFolder:
    """A folder that is this process's alone until it closes it or ends, as the kernel's lock on a file beside it says.

    Its name is a small number, because a socket's path is limited to 107 characters.
    """

    def __init__(self) -> None:
        """Take the first free number, and remove the folders that processes have left behind. Raises
        `EnvironmentLacks` where another user has created the place for them first."""
        place = _users_place()
        files = (place / f"{number}.lock" for number in itertools.count())
        self._lock, file = next((lock, file) for file in files if (lock := _locked(file)) is not None)
        self.path = _emptied(file)
        self.path.mkdir(exist_ok=True)
        for other in place.glob("*.lock"):
            if (lock := _locked(other)) is not None:
                _emptied(other)
                os.close(lock)

    def release(self) -> None:
        """Leave the folder as it is, with Ray's logs of what went wrong, to be removed when the next one is taken."""
        os.close(self._lock)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()


def _users_place() -> Path:
    """A folder that only this user can enter; Ray makes those in it everybody's."""
    folder = Path(tempfile.gettempdir()) / f"autofit-ray-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise EnvironmentLacks(
            f"{folder} is not this user's folder", remedy="remove it, or let TMPDIR name another place"
        )
    folder.chmod(0o700)
    return folder


def _locked(file: Path) -> int | None:
    """A descriptor that holds the lock until it is closed or its process ends; None if another one holds it."""
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _emptied(file: Path) -> Path:
    """The folder that belongs to a lock, with nothing left of it."""
    folder = file.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    return folder
