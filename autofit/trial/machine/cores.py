"""How many cores this process may use, and with how many threads a trial computes on them."""

from __future__ import annotations

import os
from pathlib import Path

from autofit.trial.limits import control_groups

CORES = Path("/sys/devices/system/cpu")
"""What the kernel says of each hardware thread."""


def cores() -> int:
    """Processors that this process may use, given its affinity and its control groups' quotas; at least 1."""
    return max(1, int(control_groups.processors(len(os.sched_getaffinity(0)))))


def threads() -> int:
    """Threads with which a trial on the CPU computes, as a user's run would: so many as OMP_NUM_THREADS says, or else
    one for each core, however many hardware threads it has (`mkl_get_max_threads`, which torch asks); never more than
    `cores`, and at least 1."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # one number per level of nesting
    usual = int(first) if first.isdecimal() and int(first) > 0 else _whole_cores()
    return min(cores(), usual)


def hardware_threads(computing: int) -> int:
    """How many hardware threads the cores have on which so many threads compute: others slow them down on each."""
    return computing * len(os.sched_getaffinity(0)) // _whole_cores()


def _whole_cores() -> int:
    """Cores of which this process may use a hardware thread or more; where the kernel does not say, each is alone."""
    return len({_siblings(number) for number in os.sched_getaffinity(0)})


def _siblings(number: int) -> str:
    """Which processors share the core of this one, itself included, in the kernel's words."""
    try:
        return (CORES / f"cpu{number}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return str(number)
