"""Progress of what takes long on standard error: nothing at first, then a bar on a terminal, or lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from autofit.core.units import format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.progress import Progress

QUIET_SECONDS = 2.0
"""Nothing is shown for what takes less time than this."""
SECONDS_BETWEEN_LINES = 5.0


class Display:
    """A block on standard error that is renewed in place, if that is a terminal. A context manager."""

    def __init__(self) -> None:
        self.on_terminal = sys.stderr.isatty()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with suppress(OSError):  # a terminal that has gone
                self._live.stop()

    def show(self, block: RenderableType) -> None:
        """Show it in place of the block before; for a terminal only."""
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=4, transient=True)
            self._live.start()
        self._live.update(block)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Waiting(Display):
    """Shows how many configs have been predicted, or `what` else was done."""

    def __init__(self, what: str = "configs predicted") -> None:
        super().__init__()
        self._what = what
        self._started = time.monotonic()
        self._last_line = self._started + QUIET_SECONDS - SECONDS_BETWEEN_LINES
        self._bar: Progress | None = None
        # The first may take a minute: some architectures are traced token by token.
        self._still_none = threading.Timer(SECONDS_BETWEEN_LINES, self, [0])
        self._still_none.daemon = True
        self._reporting = threading.Lock()

    def __enter__(self) -> Self:
        self._still_none.start()
        return super().__enter__()

    def __exit__(self, *details: object) -> None:
        self._still_none.cancel()
        self._still_none.join()
        super().__exit__(*details)

    def __call__(self, done: int, total: int | None = None) -> None:
        """Show that `done` are done, of `total` if that is known."""
        if done:
            self._still_none.cancel()
        with self._reporting:
            self._report(done, total)

    def _report(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if now - self._started < QUIET_SECONDS:
            return
        if self.on_terminal:
            self._bar = self._bar or self._new_bar()
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)
            self.show(self._bar)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            say(line(done, total, now - self._started, self._what))

    def _new_bar(self) -> Progress:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        bar = Progress(BarColumn(), MofNCompleteColumn(), self._what, TimeElapsedColumn())
        bar.add_task("", total=None)
        return bar


def line(done: int, total: int | None, seconds: float, what: str = "configs predicted") -> str:
    of = "" if total is None else f" of {total}"
    if (done if total is None else total) == 1:
        what = what.replace("s ", " ", 1)
    return f"{done}{of} {what} after {format_duration(seconds)}"
