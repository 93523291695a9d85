"""Optimizer states in managed memory, which none of torch's counters sees."""

from __future__ import annotations

import sys


def paged_bytes() -> int:
    """Bytes of bitsandbytes' paged states (cudaMallocManaged) in this process, wherever their pages are now."""
    functional = sys.modules.get("bitsandbytes.functional")
    if functional is None:
        return 0
    return sum(int(tensor.nbytes) for tensor in functional.GlobalPageManager.get_instance().paged_tensors)
