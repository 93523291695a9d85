"""Progress of what takes long on standard error: nothing at first, then a bar on a terminal, or lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from autofit.core.units import format_duration

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

QUIET_SECONDS = 2.0
"""Nothing is shown for what takes less time than this."""
SECONDS_BETWEEN_LINES = 5.0


class Waiting:
    """Shows how many configs have been predicted, or `what` else was done; a context manager."""

    def __init__(self, what: str = "configs predicted") -> None:
        self._what = what
        self._started = time.monotonic()
        self._last_line = self._started + QUIET_SECONDS - SECONDS_BETWEEN_LINES
        self._terminal = sys.stderr.isatty()
        self._bar: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> Waiting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar[0].stop()

    def __call__(self, done: int, total: int | None = None) -> None:
        """Show that `done` are done, of `total` if that is known."""
        now = time.monotonic()
        if now - self._started < QUIET_SECONDS:
            return
        if self._terminal:
            progress, task = self._opened()
            progress.update(task, completed=done, total=total)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(line(done, total, now - self._started, self._what), file=sys.stderr, flush=True)

    def _opened(self) -> tuple[Progress, TaskID]:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

            columns = (BarColumn(), MofNCompleteColumn(), self._what, TimeElapsedColumn())
            progress = Progress(*columns, console=Console(stderr=True), transient=True)
            progress.start()
            self._bar = progress, progress.add_task("", total=None)
        return self._bar


def line(done: int, total: int | None, seconds: float, what: str = "configs predicted") -> str:
    of = "" if total is None else f" of {total}"
    return f"{done}{of} {what} after {format_duration(seconds)}"
