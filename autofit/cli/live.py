"""Progress of searches on standard error: a live block on a terminal, otherwise a line as something happens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autofit.cli.waiting import SECONDS_BETWEEN_LINES, Display, say
from autofit.core.units import counted, format_bytes, format_duration
from autofit.techniques.short_text import short

if TYPE_CHECKING:
    from autofit.core.lattice import Config
    from autofit.operations.searching.over_hardware import Standing
    from autofit.search.progress import Progress


class ProgressDisplay(Display):
    def __init__(self) -> None:
        super().__init__()
        self._last = (-1, -1)
        self._running: tuple[Config, ...] = ()
        self._last_estimated = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if self.on_terminal:
            self.show(block(progress))
            return
        if progress.estimated is not None:
            if time.monotonic() - self._last_estimated >= SECONDS_BETWEEN_LINES:
                self._last_estimated = time.monotonic()
                say(line(progress))
            return
        if (progress.done, progress.from_store) != self._last:  # a trial has ended
            self._last = (progress.done, progress.from_store)
            say(line(progress))
        for config in progress.running:
            if config not in self._running:
                say(running(config, verifying=progress.verifying))
        self._running = progress.running


def line(progress: Progress) -> str:
    """The counts and the best so far, on one line."""
    if progress.estimated is not None:
        return "estimating {} of {} configs before the first trial".format(*progress.estimated)
    parts = [f"{counted(progress.done, 'trial')} done"]
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
    return f"  {'verifying' if verifying else 'running '} {short(config)}"


class StandingsDisplay(Display):
    """Shows how searches on several kinds of hardware stand."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, str] = {}

    def __call__(self, standings: Sequence[Standing]) -> None:
        lines = {standing.hardware: standing_line(standing) for standing in standings}
        if self.on_terminal:
            self.show("\n".join(lines.values()))
            return
        for hardware, text in lines.items():
            if self._last.get(hardware) != text:
                say(text)
        self._last = lines


def standing_line(standing: Standing) -> str:
    parts = [f"{standing.state.replace('_', ' ')}, {counted(standing.trials, 'trial')} done"]
    if standing.out_of_memory:
        parts.append(f"{standing.out_of_memory} out of memory")
    if standing.tokens_per_second is not None:
        parts.append(f"best {standing.tokens_per_second:,.0f} tokens/s")
    if standing.reason is not None:
        parts.append(standing.reason)
    return f"{standing.hardware}: {', '.join(parts)}"
