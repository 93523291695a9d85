"""From the timeline of a step to what the device reports: what the allocator reserves, and what lies outside it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autofit.estimate import heap
from autofit.estimate.allocator import Block, CachingAllocator, OutOfDeviceMemory
from autofit.estimate.cuda_kernels import cublas_workspace_bytes
from autofit.estimate.events import PHASES
from autofit.estimate.tape import Category
from autofit.estimate.timeline import Timeline
from autofit.hardware import Hardware

CONTEXT_BYTES = 400 * 1024**2
"""What a CUDA context and its loaded kernels take outside the allocator. Not measured yet: reports speak of 300 MB and
more, growing with the kernels in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a step takes, in bytes."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    host_bytes: int
    breakdown: dict[str, int]
    """By what it holds at the moment of the peak; adds up to `device_bytes`."""
    phase_peaks: dict[str, int]
    gives_back_cache: bool = False
    """Whether it stays within the limit only because the allocator gives back what it keeps unused."""


def memory(
    line: Timeline,
    hardware: Hardware,
    *,
    limit: int,
    fragmentation: float | None = None,
    wide: bool = False,
    autocast: bool = False,
) -> Memory:
    """The memory of two optimizer steps within `limit` bytes of device memory, or what it would take beyond that.

    A known `fragmentation`, as a share of what is allocated, saves the replay unless it decides about the limit. `wide`
    says that matrix products are in fp32, `autocast` that their operands are cast: a CPU's heap then keeps more.
    """
    if hardware.kind == "cuda":
        return _cuda_memory(line, hardware.capability, limit - CONTEXT_BYTES, fragmentation)
    return _host_memory(line, wide=wide, autocast=autocast)


def _cuda_memory(line: Timeline, capability: str | None, limit: int, fragmentation: float | None) -> Memory:
    workspace = cublas_workspace_bytes(capability)
    handles = 2 * workspace  # the forward's thread and autograd's
    parts = _parts(line)
    parts["temporaries"] += handles
    allocated = sum(parts.values())
    reserved, gives_back_cache = _reserved(line, workspace, allocated, limit, fragmentation)
    return Memory(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_bytes=reserved + CONTEXT_BYTES,
        host_bytes=0,
        breakdown={**parts, "fragmentation": reserved - allocated, "context": CONTEXT_BYTES},
        phase_peaks={phase: size + handles for phase, size in line.phase_peaks().items()},
        gives_back_cache=gives_back_cache,
    )


def _reserved(
    line: Timeline, workspace: int, allocated: int, limit: int, fragmentation: float | None
) -> tuple[int, bool]:
    """What the allocator reserves, and whether it gives back its cache for that to be within `limit`; without a limit
    if that is not enough."""
    known = None if fragmentation is None else int(allocated * (1.0 + fragmentation))
    if known is not None and not allocated <= limit < known:
        return known, False
    if allocated <= limit:
        try:
            within = replay(line, workspace, limit=limit)
        except OutOfDeviceMemory:
            pass
        else:
            return max(within.peak_reserved, allocated), within.retries > 0
    if known is None:
        known = max(replay(line, workspace).peak_reserved, allocated)
    return known, False


def _host_memory(line: Timeline, *, wide: bool, autocast: bool) -> Memory:
    """The heap at its largest so far, what is mapped, and what malloc keeps on top of both."""
    totals = heap.resident(line) + heap.kept(line, wide=wide, autocast=autocast)
    at = int(totals.argmax())
    peak, alive = int(totals[at]), int(line.totals[at])
    return Memory(
        peak_allocated_bytes=peak,  # a trial on a CPU has one figure for all three
        peak_reserved_bytes=peak,
        device_bytes=peak,
        host_bytes=peak,
        breakdown={**_parts(line, at), "fragmentation": peak - alive, "context": 0},
        phase_peaks=line.by_phase(totals),
    )


def _parts(line: Timeline, at: int | None = None) -> dict[str, int]:
    return {category.name.lower(): size for category, size in line.breakdown(at).items()}


def replay(
    line: Timeline, workspace: int, *, expandable_segments: bool = True, limit: int | None = None
) -> CachingAllocator:
    """The caching allocator after the whole timeline, with `limit` bytes from the driver. Raises `OutOfDeviceMemory`.

    cuBLAS takes a workspace at the first product of each thread, on the stream of all products.
    """
    allocator = CachingAllocator(expandable_segments=expandable_segments, limit=limit)
    blocks: dict[int, Block] = {}
    in_step = line.categories != Category.WEIGHTS
    of_thread = (np.flatnonzero(in_step & (line.phases == PHASES.index(phase))) for phase in ("forward", "backward"))
    first_product = {int(found[0]) for found in of_thread if len(found)}
    events = zip(line.storages.tolist(), line.sizes.tolist(), line.streams.tolist(), strict=True)
    for index, (storage, size, stream) in enumerate(events):
        if index in first_product:
            allocator.allocate(workspace)
        if size > 0:
            blocks[storage] = allocator.allocate(size, stream)
        elif size < 0:
            allocator.release(blocks.pop(storage))
    return allocator
