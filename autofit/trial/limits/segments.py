"""Expandable segments of CUDA's allocator: asked for in every trial, and done without where the driver refuses them."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from autofit.core.errors import EnvironmentLacks

if TYPE_CHECKING:
    import torch

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where CUDA's allocator finds its settings: in the second, torch's older name, if the first is not set."""
EXPANDABLE = "expandable_segments"
"""Set for every CUDA trial: without it, fragmentation reserves gigabytes that no config needs."""
_ASKED = re.compile(rf"{EXPANDABLE}\s*:\s*True")
_UNCOUNTED = re.compile(r"backend\s*:\s*((?:cuda|hip)MallocAsync)")


def allocator_settings() -> str:
    """The user's own settings of CUDA's allocator, and expandable segments unless these say otherwise.

    Raises `EnvironmentLacks` where they choose an allocator whose memory cannot be measured.
    """
    own = next(filter(None, map(os.environ.get, ALLOCATOR)), "")
    if uncounted := _UNCOUNTED.search(own):
        raise EnvironmentLacks(
            f"PYTORCH_ALLOC_CONF asks for {uncounted[1]}, whose memory torch does not count",
            remedy="leave `backend` out of it",
        )
    return own if EXPANDABLE in own else ",".join(filter(None, (own, f"{EXPANDABLE}:True")))


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
        asked, said = os.environ.get(ALLOCATOR[0], ""), str(error)
        # So it reports what a function of the driver, as virtual memory needs, has answered (C10_CUDA_DRIVER_CHECK).
        of_driver = "CUDA driver error" in said and "out of memory" not in said
        if not of_driver or not _ASKED.search(asked):
            raise
        _set(_ASKED.sub(f"{EXPANDABLE}:False", asked))
        torch.empty(1, device=device)


def _set(settings: str) -> None:
    """Have the allocator read `settings`. The whole string, because what it leaves out may return to its default."""
    import torch

    torch._C._accelerator_setAllocatorSettings(settings)
