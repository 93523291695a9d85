"""What the C library's heap takes for the tensors of a step on a processor.

PyTorch has its host memory from glibc, whose heap gives back only what is free at its very end, and little of that: a
posix_memalign takes 96 bytes more than it returns and frees them at both ends, small objects that live until the
backward settle there, and keep the holes between them from becoming one again. None of these objects is in a trace,
and where each falls decides what follows: replays of all tensors through glibc itself, with one pattern of small
objects or another between them, erred more than the shares below.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autofit.estimate.events import PHASES, Integers
from autofit.estimate.timeline import Timeline

MIB = 1024**2
MAPPED_BYTES = 32 * MIB
"""From here on glibc maps a block by itself, and gives it back when it is freed (DEFAULT_MMAP_THRESHOLD_MAX of
malloc/malloc.c)."""
SIZE_POWER = 0.25
"""Of the size of a freed block in MiB, by which its bytes count more: the larger a hole, the more blocks split it."""
SHARES = np.array([62 * MIB, 0.069, 0.14, 0.21, 0.33])
"""Of `causes`, in their order: fitted to the 84 configs of recorded/cpu-2c-every-axis.jsonl and
cpu-2c-main-job-trials.jsonl in benchmarks by benchmarks/estimate_cpu.py, and to no table that judges searches. It also
prints how far a fit to the other tables is off."""


def resident(line: Timeline) -> Integers:
    """Bytes of the tensors' pages after each event: the most that the heap has held so far, and what is mapped now."""
    mapped = np.abs(line.sizes) >= MAPPED_BYTES
    in_heap = np.cumsum(np.where(mapped, 0, line.sizes))
    found: Integers = np.maximum.accumulate(in_heap) + np.cumsum(np.where(mapped, line.sizes, 0))
    return found


def causes(line: Timeline, *, wide: bool) -> NDArray[np.float64]:
    """What the heap keeps beside that follows from, without what is mapped: 1, for what every trial takes; what the
    last forward frees; the same again where products are in fp32 (`wide`), beside which pairs of trials with tensors of
    the same sizes show as much again; bytes that it saves for the backward; and what the first update frees between
    states that it leaves, at most as much as these.
    """
    forward, update = line.phases == PHASES.index("forward"), line.phases == PHASES.index("optimizer")
    stop = int(np.flatnonzero(forward)[-1]) + 1
    start = int(np.flatnonzero(~forward[:stop])[-1]) + 1
    freed, saved = _blocks(line, start, stop)
    weighed = float((freed * (freed / MIB) ** SIZE_POWER).sum())
    first = int(np.argmax(update)) if update.any() else len(update)
    others = np.flatnonzero(~update[first:])
    passing, states = _blocks(line, first, first + int(others[0]) if len(others) else len(update))
    return np.array([1.0, weighed, weighed if wide else 0.0, saved.sum(), min(passing.sum(), states.sum())])


def kept(line: Timeline, *, wide: bool) -> int:
    """Bytes that a trial takes beside `resident`."""
    return int(SHARES @ causes(line, wide=wide))


def _blocks(line: Timeline, start: int, stop: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sizes of the heap's blocks that are allocated between two events: of those freed there, too, and of the others.

    What is never freed, as an optimizer's states, is among the others.
    """
    part = slice(start, stop)
    allocates = (line.sizes[part] > 0) & (line.sizes[part] < MAPPED_BYTES)
    own, sizes = line.storages[part][allocates], line.sizes[part][allocates].astype(np.float64)
    freed = np.isin(own, line.storages[part][line.sizes[part] < 0])
    return sizes[freed], sizes[~freed]
