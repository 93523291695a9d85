"""The memory of the host on which a trial runs: whether it suffices, and the end of a trial that is about to use it up.

On a CPU each process has its memory limit (`process_memory.limit_to`). On an accelerator nothing limits what a
trial takes of its host, and what CUDA locks there is in no process's count: only the host's own figure shows it.
"""

from __future__ import annotations

from autofit.core.outcome import Crashed, OutOfMemory
from autofit.core.units import GIB, format_bytes
from autofit.trial.measure import process_memory

RESERVE_BYTES = GIB
"""What a trial must leave of its host's memory: enough for what may be taken between two checks, and for the processes
that wait for the trial. With less, the kernel kills, and not always the trial. On a small host, an eighth of what was
available when the trial began."""


class HostWatch:
    """Watches the host's memory while a trial runs on an accelerator, ten times a second. Used from one thread."""

    def __init__(self, *, is_device: bool) -> None:
        """`is_device`: the accelerator has no other memory than the host's."""
        self._is_device = is_device
        self._before = process_memory.host_available()

    def exhausted(self, phase: str) -> OutOfMemory | Crashed | None:
        """The outcome of the trial, in this `phase`, if less than the reserve is left; None where that is not so, and
        where the host does not say."""
        available = process_memory.host_available()
        if self._before is None or available is None or available >= min(RESERVE_BYTES, self._before // 8):
            return None
        reason = (
            f"the host is out of memory: {format_bytes(available)} were left of the {format_bytes(self._before)} that "
            "were available when the trial began"
        )
        if self._before <= RESERVE_BYTES:  # others had left the trial no more from the start
            return Crashed(reason=f"{reason}: other processes hold the rest", phase=phase, transient=True)
        return OutOfMemory(reason=reason, phase=phase, host=not self._is_device)


def host_shortage(limit: int, ranks: int, available: int | None) -> int:
    """Bytes by which the host falls short of the memory limits of all ranks of a trial, `limit` each, with `available`
    bytes left (None where it does not say). Other ranks may hold theirs by now."""
    return 0 if available is None else max(0, ranks * limit - available)
