"""What the C library's heap takes for a step's tensors on a CPU.

PyTorch gets its host memory from glibc, whose heap gives back only what is free at its very end, and little of that: a
posix_memalign takes 96 bytes more than it returns and frees them at both ends; small objects that live until the
backward settle there, and keep the holes between them from coalescing. None of these objects is in a trace, and where
each lands decides what follows: replays of all tensors through glibc itself, with various patterns of small objects
between them, were less accurate than the shares below.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autofit.estimate.events import PHASES, Integers
from autofit.estimate.timeline import Timeline

MIB = 1024**2
MAPPED_BYTES = 32 * MIB
"""From this size on glibc maps a block by itself, and gives it back when it is freed (DEFAULT_MMAP_THRESHOLD_MAX of
malloc/malloc.c)."""
SIZE_POWER = 0.25
"""Power of a freed block's size in MiB by which its bytes are weighted: the larger a hole, the more blocks split it."""
SHARES = np.array([66 * MIB, 0.051, 0.15, 0.034, 0.17, 0.41])
"""Coefficients of `causes`, in their order. benchmarks/estimate_cpu.py fits them to the 84 configs of
cpu-2c-every-axis.jsonl and cpu-2c-main-job-trials.jsonl in benchmarks/recorded, and to no table that searches are
judged by; it also prints the error of a fit to the other tables."""


def resident(line: Timeline) -> Integers:
    """Bytes of the tensors' pages after each event: the most that the heap has held so far, plus what is mapped now."""
    mapped = np.abs(line.sizes) >= MAPPED_BYTES
    in_heap = np.cumsum(np.where(mapped, 0, line.sizes))
    found: Integers = np.maximum.accumulate(in_heap) + np.cumsum(np.where(mapped, line.sizes, 0))
    return found


def causes(line: Timeline, *, wide: bool, autocast: bool) -> NDArray[np.float64]:
    """The quantities that explain what the heap keeps on top of `resident`, mapped blocks left out.

    They are 1, for what every trial takes; what the last forward frees, weighted by block size; the same again where
    products are in fp32 (`wide`), where pairs of trials with tensors of the same sizes show as much again; once more
    where the operands of products are cast (`autocast`), because the copies leave holes of other sizes; the bytes that
    this forward saves for the backward; and what the first update frees between the states that it leaves, at most as
    much as those.
    """
    forward, update = line.phases == PHASES.index("forward"), line.phases == PHASES.index("optimizer")
    stop = int(np.flatnonzero(forward)[-1]) + 1
    start = int(np.flatnonzero(~forward[:stop])[-1]) + 1
    freed, saved = _blocks(line, start, stop)
    weighed = float((freed * (freed / MIB) ** SIZE_POWER).sum())
    first = int(np.argmax(update)) if update.any() else len(update)
    others = np.flatnonzero(~update[first:])
    passing, states = _blocks(line, first, first + int(others[0]) if len(others) else len(update))
    by_format = (weighed, weighed if wide else 0.0, weighed if autocast else 0.0)
    return np.array([1.0, *by_format, saved.sum(), min(passing.sum(), states.sum())])


def kept(line: Timeline, *, wide: bool, autocast: bool) -> int:
    """Bytes that a trial takes on top of `resident`."""
    return int(SHARES @ causes(line, wide=wide, autocast=autocast))


def _blocks(line: Timeline, start: int, stop: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sizes of the heap's blocks allocated between two events: of those also freed between them, and of the others.

    What is never freed, such as an optimizer's states, is among the others.
    """
    part = slice(start, stop)
    allocates = (line.sizes[part] > 0) & (line.sizes[part] < MAPPED_BYTES)
    own, sizes = line.storages[part][allocates], line.sizes[part][allocates].astype(np.float64)
    freed = np.isin(own, line.storages[part][line.sizes[part] < 0])
    return sizes[freed], sizes[~freed]
