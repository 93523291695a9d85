"""From the timeline of a step to what the device reports: what the allocator reserves, and what lies outside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autofit.estimate import heap
from autofit.estimate.allocator import CachingAllocator
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


def memory(
    line: Timeline,
    hardware: Hardware,
    fragmentation: float | None = None,
    *,
    wide: bool = False,
    autocast: bool = False,
) -> Memory:
    """The memory of two optimizer steps. A known `fragmentation`, as a share of what is allocated, saves the replay.

    `wide` says that matrix products are in fp32, `autocast` that their operands are cast: a CPU's heap then keeps more.
    """
    if hardware.kind == "cuda":
        return _cuda_memory(line, hardware.capability, fragmentation)
    return _host_memory(line, wide=wide, autocast=autocast)


def _cuda_memory(line: Timeline, capability: str | None, fragmentation: float | None) -> Memory:
    workspace = cublas_workspace_bytes(capability)
    handles = 2 * workspace  # the forward's thread and autograd's
    parts = _parts(line)
    parts["temporaries"] += handles
    allocated = sum(parts.values())
    if fragmentation is None:
        reserved = max(replay(line, workspace), allocated)
    else:
        reserved = int(allocated * (1.0 + fragmentation))
    return Memory(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_bytes=reserved + CONTEXT_BYTES,
        host_bytes=0,
        breakdown={**parts, "fragmentation": reserved - allocated, "context": CONTEXT_BYTES},
        phase_peaks={phase: size + handles for phase, size in line.phase_peaks().items()},
    )


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


def replay(line: Timeline, workspace: int, *, expandable_segments: bool = True) -> int:
    """The most that the caching allocator reserves over the whole timeline; each stream has its own blocks.

    cuBLAS takes a workspace at the first product of each thread.
    """
    streams = {
        stream: CachingAllocator(expandable_segments=expandable_segments) for stream in {0, *line.streams.tolist()}
    }
    blocks: dict[int, Any] = {}
    in_step = line.categories != Category.WEIGHTS
    first_product = {int(np.argmax(in_step & (line.phases == PHASES.index(p)))) for p in ("forward", "backward")}
    events = zip(line.storages.tolist(), line.sizes.tolist(), line.streams.tolist(), strict=True)
    for index, (storage, size, stream) in enumerate(events):
        if index in first_product:
            streams[0].allocate(workspace)
        if size > 0:
            blocks[storage] = streams[stream].allocate(size)
        elif size < 0:
            streams[stream].release(blocks.pop(storage))
    return sum(allocator.peak_reserved for allocator in streams.values())  # nothing is given back in between
