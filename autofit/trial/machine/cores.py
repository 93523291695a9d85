"""How many cores this process may use, and with how many threads a trial computes on them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from autofit.trial.limits import control_groups

if TYPE_CHECKING:
    from autofit.core.device.hardware import Hardware
    from autofit.training.distributed.rendezvous import Rendezvous

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


def threads_per_rank(hardware: Hardware, rendezvous: Rendezvous | None, *, sharing: int = 1) -> int:
    """An even share of this machine's cores for each of the group's ranks on it, and for each of `sharing` ranks of any
    trial where there are more; all of them for a process on its own. On the CPU they are those that the hardware was
    found to have.

    Updates of offloaded weights run there: on all cores, those of several trials would take them from one another.
    """
    available = hardware.cores if hardware.kind == "cpu" else cores()
    return max(1, available // max(sharing, rendezvous.ranks_here if rendezvous is not None else 1))


def use_threads(count: int) -> None:
    """Have torch compute with `count` threads, and OpenMP code that is loaded later, such as DeepSpeed's CPU Adam.

    Whatever the environment says is replaced: Ray sets `OMP_NUM_THREADS` to the cores that a worker asks for, which is
    one for a GPU's, and torchrun sets it to one. On the CPU, what the user has set there is part of the hardware.
    """
    import torch

    os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)


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
