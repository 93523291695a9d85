"""Progress of a search on standard error: a live block on a terminal, otherwise a line as each trial starts or ends."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from autofit.cli.waiting import SECONDS_BETWEEN_LINES
from autofit.core.units import format_bytes, format_duration
from autofit.techniques.short_text import short

if TYPE_CHECKING:
    from autofit.core.lattice import Config
    from autofit.search.progress import Progress


class ProgressDisplay:
    """Shows the progress of a search; a context manager."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = (-1, -1)
        self._running: tuple[Config, ...] = ()
        self._last_estimated = time.monotonic()
        self._live = None
        if self._terminal:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=4, transient=True)

    def __enter__(self) -> ProgressDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, progress: Progress) -> None:
        if self._live is not None:
            self._live.update(block(progress))
        elif progress.estimated is not None:
            if time.monotonic() - self._last_estimated >= SECONDS_BETWEEN_LINES:
                self._last_estimated = time.monotonic()
                print(line(progress), file=sys.stderr, flush=True)
        else:
            self._print_changes(progress)

    def _print_changes(self, progress: Progress) -> None:
        """Print a line when a trial has ended, and one when a trial starts."""
        if (progress.done, progress.from_store) != self._last:
            self._last = (progress.done, progress.from_store)
            print(line(progress), file=sys.stderr, flush=True)
        for config in progress.running:
            if config not in self._running:
                print(running(config, verifying=progress.verifying), file=sys.stderr, flush=True)
        self._running = progress.running


def line(progress: Progress) -> str:
    """The counts and the best so far, on one line."""
    if progress.estimated is not None:
        return "estimating {} of {} configs before the first trial".format(*progress.estimated)
    parts = [f"{progress.done} trials done"]
    if progress.running:
        parts.append(f"{len(progress.running)} running")
    parts.append(f"{progress.out_of_memory} out of memory")
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    parts.append(f"{progress.ruled_out} of {progress.candidates} ruled out")
    if progress.from_store:
        parts.append(f"{progress.from_store} from the store")
    if progress.best is not None:
        m = progress.best.measurement
        parts.append(f"best {m.tokens_per_second:,.0f} tokens/s at {format_bytes(m.device_bytes)}")
    if progress.left_seconds is not None:
        parts.append(f"{format_duration(max(0.0, progress.left_seconds))} left")
    return ", ".join(parts)


def block(progress: Progress) -> str:
    """The same, followed by the best config and the configs that are running."""
    lines = [line(progress)]
    if progress.best is not None:
        lines.append(f"  best     {short(progress.best.config)}")
    lines += [running(config, verifying=progress.verifying) for config in progress.running]
    return "\n".join(lines)


def running(config: Config, *, verifying: bool) -> str:
    """One line for a config under way."""
    return f"  {'verifying' if verifying else 'running '} {short(config)}"
