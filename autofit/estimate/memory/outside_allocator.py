"""Memory that a step takes outside the device's allocator: activations on the host, paged optimizer states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autofit.estimate.memory.memory_trace import MemoryTrace
from autofit.estimate.memory.symbolic_sizes import SymbolicSizes


@dataclass(frozen=True, slots=True)
class PinnedCopies:
    """Activations that wait in pinned host memory, as functions of micro-batch and rank."""

    sizes: SymbolicSizes
    times: NDArray[np.float64]
    """How many layers each stands for."""

    @classmethod
    def of(cls, trace: MemoryTrace, counts: Mapping[int, int]) -> PinnedCopies:
        """From a decoder's trace; `counts` is how many layers each of its layers stands for (1 where not named)."""
        found = [
            (size, counts.get(place.layer, 1))
            for place, sizes in trace.elsewhere.items()
            if place.stage == "forward-1"
            for size in sizes
        ]
        return cls(
            SymbolicSizes.of(size for size, _ in found), np.array([times for _, times in found], dtype=np.float64)
        )

    def bytes_at(self, micro_batch: int, rank: int) -> int:
        """Bytes that are copied in one forward."""
        return int(self.times @ self.sizes.at(micro_batch, rank))

    def blocks_at(self, micro_batch: int, rank: int) -> int:
        """Bytes of host memory at the end of a forward, in blocks that the next one reuses.

        A block's size is the next power of two (CachingHostAllocatorImpl::allocate in aten/src/ATen/core/
        CachingHostAllocator.h).
        """
        sizes = self.sizes.at(micro_batch, rank)
        blocks = np.zeros_like(sizes)
        some = sizes > 0
        blocks[some] = 2 ** np.ceil(np.log2(sizes[some]))
        return int(self.times @ blocks)


def paged_bytes(trace: MemoryTrace) -> int:
    """Bytes of optimizer states in managed memory: in full, as in a trial, because a device with room holds them."""
    return sum(size for sizes in trace.elsewhere.values() for size in sizes)
