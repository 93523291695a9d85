"""How many threads a trial's process computes with on the processor: updates of offloaded weights are made there."""

from __future__ import annotations

import os

import torch

from autofit.core.device.hardware import Hardware
from autofit.training.distributed.rendezvous import Rendezvous
from autofit.trial.machine.cores import cores


def threads_per_rank(hardware: Hardware, rendezvous: Rendezvous | None, *, sharing: int = 1) -> int:
    """An even share of this machine's cores for each of the group's ranks on it, and for each of `sharing` ranks of any
    trial where there are more; all of them for a process on its own. On the CPU they are those that the hardware was
    found to have.

    Trials that update offloaded weights at the same time on all cores would take them from one another, and their times
    would depend on what happens to run beside them.
    """
    available = hardware.cores if hardware.kind == "cpu" else cores()
    return max(1, available // max(sharing, rendezvous.ranks_here if rendezvous is not None else 1))


def use_threads(count: int) -> None:
    """Have torch compute with `count` threads, and OpenMP code that is loaded later, such as DeepSpeed's CPU Adam.

    Whatever the environment says is replaced: Ray sets `OMP_NUM_THREADS` to the cores that a worker asks for, which is
    one for a GPU's, and torchrun sets it to one. On the CPU, what the user has set there is part of the hardware.
    """
    os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)
