"""Commands to the fork server, one per line."""

from __future__ import annotations

import json
import os
from typing import Any


class Stopped(Exception):
    """The running trial is no longer wanted."""

    def __init__(self, *, interrupted: bool) -> None:
        super().__init__()
        self.interrupted = interrupted
        """Whether the user has stopped it, and not another rank's failure."""


class Commands:
    """JSON lines read from a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._pending = b""

    def next(self) -> dict[str, Any] | None:
        """The next line; None once the other end has closed."""
        while b"\n" not in self._pending:
            chunk = os.read(self.descriptor, 1 << 16)
            if not chunk:
                return None
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        data: dict[str, Any] = json.loads(line)
        return data

    def check(self) -> None:
        """Read what has arrived. Raises `Stopped` for a stop command, the only one that comes while a trial runs, and
        `EOFError` if the other end has closed."""
        if not self.waiting:
            chunk = os.read(self.descriptor, 1 << 16)
            if not chunk:
                raise EOFError
            self._pending += chunk
        command = (self.next() or {}) if self.waiting else {}
        if "stop" in command:
            raise Stopped(interrupted=command["stop"]["interrupted"])

    @property
    def waiting(self) -> bool:
        """Whether a line is already buffered: the descriptor no longer reports it as readable."""
        return b"\n" in self._pending
