"""Memory of the current process as Linux accounts for it: the source of a CPU trial's peak."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autofit.core.units import KIB
from autofit.trial.limits import control_groups

CLEAR_REFS = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
device_bytes_taken_before = 0
"""What this process's context and other processes held of its CUDA device before the trial allocated anything."""
_FIGURES = {"VmHWM", "VmRSS", "VmData", "RssAnon", "RssFile", "RssShmem"}


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes, from /proc/self/status."""

    peak_resident: int
    """With what is swapped out now, of which the kernel keeps no peak: at most this was taken at once."""
    resident: int
    anonymous: int
    """Memory that no file backs, resident or swapped out, including pages shared with the parent since the fork."""
    file_backed: int
    """Resident pages of libraries and other files, including shared memory."""
    data: int
    """Writable private address space: what RLIMIT_DATA limits."""

    @property
    def peak_anonymous(self) -> int:
        """Peak of the anonymous memory. File-backed pages only grow in a trial; those of now are subtracted."""
        return self.peak_resident - self.file_backed


def read() -> ProcessMemory:
    """The current figures. Where a sandbox reports only the resident size, this stands in for its peak and for the
    anonymous part: `is_accounted` tells."""
    fields = _fields()
    resident = fields["VmRSS"]
    swapped = fields.get("VmSwap", 0)
    return ProcessMemory(
        peak_resident=fields.get("VmHWM", resident) + swapped,
        resident=resident,
        anonymous=fields.get("RssAnon", resident) + swapped,
        file_backed=fields.get("RssFile", 0) + fields.get("RssShmem", 0),
        data=fields.get("VmData", resident),
    )


def _fields() -> dict[str, int]:
    """Memory sizes of /proc/self/status, in bytes."""
    fields: dict[str, int] = {}
    for line in STATUS.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.startswith(("Vm", "Rss")):
            fields[name] = int(rest.split()[0]) * KIB
    return fields


def is_readable() -> bool:
    """Whether `read` works, which is all that a trial on an accelerator needs; some sandboxes have no /proc."""
    try:
        read()
    except (OSError, KeyError, ValueError):
        return False
    return True


def is_accounted() -> bool:
    """Whether this system also reports every figure by itself and lets `reset_peak` work, so that the host can be the
    device; kernels without CONFIG_PROC_PAGE_MONITOR and some sandboxes do not."""
    return is_readable() and _fields().keys() >= _FIGURES and os.access(CLEAR_REFS, os.W_OK)


def reset_peak() -> None:
    """Restart `peak_resident` from the current resident size (Linux 4.0; proc(5), clear_refs)."""
    CLEAR_REFS.write_text("5")


def trim() -> None:
    """Return freed heap memory to the kernel, where the C library can (malloc_trim(3), glibc)."""
    gc.collect()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def host_available() -> int | None:
    """Bytes that programs could still allocate on this machine (proc(5), MemAvailable) and in this process's control
    groups; None where the machine does not say."""
    with suppress(OSError, KeyError):
        return control_groups.memory_left_bytes(control_groups.numbers(Path("/proc/meminfo"))["MemAvailable"] * KIB)
    return None


def limit_to(allowed: int) -> None:
    """Make allocations fail once this process has so many bytes of its own (RLIMIT_DATA; Linux 4.7)."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        allowed = min(allowed, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))


def lift_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def room() -> int | None:
    """Bytes that this process may still get before allocations fail; None if no limit is set."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else soft - read().data


def prefer_as_oom_victim() -> None:
    """Ask the kernel to kill this process first when the machine runs out of memory, rather than the waiting search."""
    with suppress(OSError):  # not writable in some sandboxes: then the kernel's own choice stands
        Path("/proc/self/oom_score_adj").write_text("1000")


def paged_bytes() -> int:
    """Bytes of bitsandbytes' paged optimizer states (cudaMallocManaged) in this process, wherever their pages are now:
    none of torch's counters sees them."""
    functional = sys.modules.get("bitsandbytes.functional")
    if functional is None:
        return 0
    return sum(int(tensor.nbytes) for tensor in functional.GlobalPageManager.get_instance().paged_tensors)
