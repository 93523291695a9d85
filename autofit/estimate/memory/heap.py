"""What the C library's heap takes for a step's tensors on a CPU.

PyTorch gets its host memory from glibc, whose heap gives back only what is free at its very end, and little of that:
small objects that live until the backward settle between the tensors and keep holes from coalescing. None of them is in
a trace. Replays of all tensors through glibc itself were less accurate than the shares below.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autofit.core.outcome import PHASES
from autofit.core.units import MIB
from autofit.estimate.memory.events import Integers
from autofit.estimate.memory.memory_trace import Category
from autofit.estimate.memory.timeline import Timeline

MAPPED_BYTES = 32 * MIB
"""From this size on glibc maps a block by itself, and gives it back when it is freed (DEFAULT_MMAP_THRESHOLD_MAX of
malloc/malloc.c)."""
SIZE_POWER = 0.25
"""Power of a block's size in MiB by which its bytes are weighted: the larger a hole, the more blocks split it, and the
larger a block, the fewer holes it fits in."""
SHARES = np.array([58.9 * MIB, 0.056, 0.151, 0.032, -0.011, 0.229, 0.639, 0.974])
"""Coefficients of `causes`, in their order. The first seven have the least absolute relative errors over the 84 configs
of cpu-2c-every-axis.jsonl and cpu-2c-main-job-trials.jsonl in benchmarks/recorded, by which no search is judged. The
last is the median, over the 16 configs with offload of memory/offload-cpu-zen5-2c-pythia-160m.jsonl, of what the others
leave, relative to its cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What decides, besides the sizes of a step's tensors, how they fall in the heap."""

    wide: bool = False
    """Whether matrix products are in fp32."""
    autocast: bool = False
    """Whether the operands of matrix products are cast."""
    dequantises: bool = False
    """Whether weights are dequantised for each matrix product."""
    quantised_states: bool = False
    """Whether the optimizer keeps its states in 8 bits."""
    offloads: bool = False
    """Whether gradients are handed to an optimizer in host memory."""


def resident(line: Timeline) -> Integers:
    """Bytes of the tensors' pages after each event: the most that the heap has held so far, plus what is mapped now."""
    mapped = np.abs(line.sizes) >= MAPPED_BYTES
    in_heap = np.cumsum(np.where(mapped, 0, line.sizes))
    total: Integers = np.maximum.accumulate(in_heap) + np.cumsum(np.where(mapped, line.sizes, 0))
    return total


def causes(line: Timeline, traits: Traits) -> NDArray[np.float64]:
    """The quantities that explain what the heap keeps on top of `resident`, mapped blocks left out.

    They are

    * 1, for what every trial takes;
    * what the last forward frees, weighted by block size;
    * the same again where products are in fp32: pairs of trials with tensors of the same sizes show as much again;
    * once more where their operands are cast, because the copies leave holes of other sizes;
    * and once more, less, where weights are dequantised: each is as large as the one before, and takes its place;
    * what that forward saves for the backward, weighted by block size;
    * states in 8 bits, which the first update makes while copies of them in fp32 come and go;
    * with offload, the gradients that the last backward makes and frees again: DeepSpeed takes the norm of each one on
      an fp64 copy, twice or four times as large, which does not fit where the one before was.
    """
    last_forward, last_backward = (_runs(line, phase)[-1] for phase in ("forward", "backward"))
    freed, saved = (_weighted(sizes) for sizes in _blocks(line, last_forward))
    by_format = [freed * applies for applies in (traits.wide, traits.autocast, traits.dequantises)]
    states = dropped = 0.0
    if traits.quantised_states:
        states = float(_blocks(line, _runs(line, "optimizer")[0])[1].sum())
    if traits.offloads:
        dropped = float(_blocks(line, last_backward, line.categories == Category.GRADIENTS)[0].sum())
    return np.array([1.0, freed, *by_format, saved, states, dropped])


def kept(line: Timeline, traits: Traits) -> int:
    """Bytes that a trial takes on top of `resident`."""
    return int(SHARES @ causes(line, traits))


def _runs(line: Timeline, phase: str) -> list[slice]:
    """The events of each time that a step is in `phase`."""
    inside = np.concatenate([[False], line.phases == PHASES.index(phase), [False]])
    edges = np.flatnonzero(inside[1:] != inside[:-1]).tolist()
    return [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _weighted(sizes: NDArray[np.float64]) -> float:
    return float((sizes * (sizes / MIB) ** SIZE_POWER).sum())


def _blocks(
    line: Timeline, part: slice, which: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sizes of the heap's blocks allocated in these events: of those also freed in them, and of the others. Without
    `which`, a flag for every event of the line, all blocks count."""
    allocates = (line.sizes[part] > 0) & (line.sizes[part] < MAPPED_BYTES)
    if which is not None:
        allocates &= which[part]
    storages, sizes = line.storages[part][allocates], line.sizes[part][allocates].astype(np.float64)
    freed = np.isin(storages, line.storages[part][line.sizes[part] < 0])
    return sizes[freed], sizes[~freed]
