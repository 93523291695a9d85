"""From what a child left behind to a typed outcome."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from autofit.outcome import Crashed, OutOfMemory, TimedOut
from autofit.trial import process_memory

_CUDA_REQUEST = re.compile(r"Tried to allocate ([\d.]+) (bytes|[KMGT]iB)")
_CPU_REQUEST = re.compile(r"you tried to allocate (\d+) bytes")
_UNITS = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
_HOST_SIGNS = (
    "can't allocate memory",
    "not enough memory",
    "cannot allocate memory",
    "std::bad_alloc",
    "could not create a memory object",
    "failed to allocate memory",
)
"""What torch, oneDNN, glibc and Python say when a host allocation fails (lower case)."""
_AMBIGUOUS_SIGNS = ("could not create a primitive", "could not execute a primitive")
"""oneDNN says this when its own allocation fails, and also for what it does not support."""
NO_ROOM_BYTES = 64 * 1024**2
"""With less than this left, an ambiguous failure is one of memory: oneDNN's scratch space is a few MiB."""
_STDERR_SIGNS = (*_HOST_SIGNS, "memoryerror", "thread creation failed", "out of memory")


def memory_failure(error: BaseException, phase: str, *, host_is_device: bool) -> OutOfMemory | None:
    """The out-of-memory outcome that `error` stands for; None for any other error."""
    import torch

    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        match = _CUDA_REQUEST.search(text)
        requested = int(float(match[1]) * _UNITS[match[2]]) if match else None
        return OutOfMemory(reason=text.splitlines()[0][:500], phase=phase, requested_bytes=requested)
    lowered = text.lower()
    host_failed = isinstance(error, MemoryError) or any(sign in lowered for sign in _HOST_SIGNS)
    if host_failed or (any(sign in lowered for sign in _AMBIGUOUS_SIGNS) and _no_room()):
        match = _CPU_REQUEST.search(text)
        return OutOfMemory(
            reason=(text.splitlines()[0] if text else "MemoryError")[:500],
            phase=phase,
            requested_bytes=int(match[1]) if match else None,
            host=not host_is_device,
        )
    if isinstance(error, RuntimeError) and ("out of memory" in lowered or "cublas_status_alloc_failed" in lowered):
        return OutOfMemory(reason=text.splitlines()[0][:500], phase=phase)
    return None


def ended_without_result(
    *, status: int, phase: str, room: int | None, stderr: str, kernel_oom_kills: int, host_is_device: bool
) -> OutOfMemory | Crashed:
    """The outcome of a child that ended on its own without a result.

    `status` is that of `os.waitpid`; `kernel_oom_kills` counts the kills that the kernel booked meanwhile; `room` is
    what was left of the memory limit when the phase began, bytes.
    """
    tail = "\n".join(stderr.splitlines()[-20:])
    if status < 0:
        name = signal.Signals(-status).name
        if name == "SIGKILL":
            why = (
                "the kernel killed the trial: the host is out of memory"
                if kernel_oom_kills
                else "killed by SIGKILL from outside, which is how the kernel ends a process when memory runs out"
            )
            return OutOfMemory(reason=why, phase=phase, signal=name, host=not host_is_device)
        if any(sign in stderr.lower() for sign in _STDERR_SIGNS):
            return OutOfMemory(reason=_last_line(stderr), phase=phase, signal=name, host=not host_is_device)
        if room is not None and room < NO_ROOM_BYTES:
            # Much native code does not survive a failed allocation.
            reason = f"the trial's process died of {name} with {max(0, room)} bytes left of its memory limit"
            return OutOfMemory(reason=reason, phase=phase, signal=name, host=not host_is_device)
        return Crashed(reason=f"the trial's process died of {name}", phase=phase, signal=name, stderr_tail=tail)
    if status != 0 and any(sign in stderr.lower() for sign in _STDERR_SIGNS):
        return OutOfMemory(reason=_last_line(stderr), phase=phase, host=not host_is_device)
    return Crashed(
        reason=f"the trial's process exited with status {status} and no result",
        phase=phase,
        exit_code=status,
        stderr_tail=tail,
    )


def timed_out(*, deadline_seconds: float, phase: str) -> TimedOut:
    """The outcome of a child that the parent killed at its deadline."""
    return TimedOut(
        reason=f"not finished after {deadline_seconds:g} s, in phase {phase}",
        deadline_seconds=deadline_seconds,
        phase=phase,
    )


def kernel_oom_kills() -> int:
    """Processes that the kernel has killed for memory in this control group so far; 0 where it does not say."""
    for path in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        try:
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        except OSError:
            continue
    return 0


def _no_room() -> bool:
    left = process_memory.room()
    return left is not None and left < NO_ROOM_BYTES


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else "out of memory"
