"""Expandable segments of CUDA's allocator: on in every trial, and off where the driver refuses them."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from autofit.core.errors import EnvironmentLacks

if TYPE_CHECKING:
    import torch

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where CUDA's allocator finds its settings: in the second, torch's older name, if the first is not set. torch 2.9.1
finds expandable segments under the second alone (pytorch issue 183387), and 2.13 warns of neither."""
EXPANDABLE = "expandable_segments"
"""Set for every CUDA trial: without it, fragmentation reserves gigabytes that no config needs."""
_EXPANDABLE_ON = re.compile(rf"{EXPANDABLE}\s*:\s*True")
_UNCOUNTED = re.compile(r"backend\s*:\s*((?:cuda|hip)MallocAsync)")


def allocator_settings() -> str:
    """The user's settings of CUDA's allocator, with expandable segments unless they say otherwise.

    Raises `EnvironmentLacks` where they choose an allocator whose memory cannot be measured.
    """
    settings = next(filter(None, map(os.environ.get, ALLOCATOR)), "")
    if uncounted := _UNCOUNTED.search(settings):
        raise EnvironmentLacks(
            f"PYTORCH_ALLOC_CONF asks for {uncounted[1]}, whose memory torch does not count",
            remedy="leave `backend` out of it",
        )
    return settings if EXPANDABLE in settings else ",".join(filter(None, (settings, f"{EXPANDABLE}:True")))


def first_allocation(device: torch.device) -> None:
    """Make this process's first allocation on `device`; without expandable segments where its driver refuses them.

    Torch does not fall back by itself: every allocation then fails with "CUDA driver error: operation not supported"
    or "unknown error", as under WSL2 and on many vGPUs (pytorch/pytorch issue 192330).
    """
    import torch

    try:
        torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        settings, message = os.environ.get(ALLOCATOR[0], ""), str(error)
        # Torch reports errors of the driver's functions, which virtual memory needs, this way (C10_CUDA_DRIVER_CHECK).
        of_driver = "CUDA driver error" in message and "out of memory" not in message
        if not of_driver or not _EXPANDABLE_ON.search(settings):
            raise
        # The whole string, because what it leaves out may return to its default.
        torch._C._accelerator_setAllocatorSettings(_EXPANDABLE_ON.sub(f"{EXPANDABLE}:False", settings))
        torch.empty(1, device=device)
