"""The memory of the host on which a trial runs: whether it suffices, and the end of a trial that is about to use it up.

On a CPU each process has its memory limit (`process_memory.limit_further`). On an accelerator nothing limits what a
trial takes of its host, and what CUDA locks there is in no process's count: only the host's own figure shows it.
"""

from __future__ import annotations

from autofit.core.outcome import Crashed, OutOfMemory
from autofit.core.units import format_bytes
from autofit.trial.measure import process_memory

RESERVE_BYTES = 1024**3
"""What a trial must leave of its host's memory: enough for what may be taken between two checks, and for the processes
that wait for the trial. With less, the kernel kills, and not always the trial. On a small host, an eighth of what was
available when the trial began."""


class HostExhausted(Exception):
    """The trial leaves too little of the host's memory; the message gives the figures."""


class HostWatch:
    """Watches the host's memory while a trial runs on an accelerator, ten times a second. Used from one thread."""

    def __init__(self) -> None:
        self._before = process_memory.host_available()
        self._reserve = RESERVE_BYTES if self._before is None else min(RESERVE_BYTES, self._before // 8)

    def check(self) -> None:
        """Raises `HostExhausted` if less than the reserve is left; does nothing where the host does not say."""
        if self._before is None:
            return
        available = process_memory.host_available()
        if available is not None and available < self._reserve:
            raise HostExhausted(
                f"the host is out of memory: {format_bytes(available)} were left of the {format_bytes(self._before)} "
                "that were available when the trial began"
            )

    def outcome(self, error: HostExhausted, phase: str) -> OutOfMemory | Crashed:
        """The outcome of a trial that was ended for `error`; transient if others had left it no more than the reserve
        from the start."""
        if self._before is not None and self._before <= RESERVE_BYTES:
            return Crashed(reason=f"{error}: other processes hold the rest", phase=phase, transient=True)
        return OutOfMemory(reason=str(error), phase=phase, host=True)


def host_shortage(limit: int, ranks: int, available: int | None) -> int:
    """Bytes by which the host falls short of the memory limits of all ranks of a trial, `limit` each, with `available`
    bytes left (None where it does not say). Other ranks may hold theirs by now."""
    return 0 if available is None else max(0, ranks * limit - available)
