"""Whether each step leaves memory behind, which would end a run of thousands of steps."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

LEAK_STEPS = 6
"""With fewer steps, a heap that is settling looks like one that grows."""


def may_leak(in_use: Sequence[int], noise_bytes: int) -> bool:
    """Whether memory has grown by more than `noise_bytes` at every step so far, in too few steps for `leak` to tell."""
    return len(in_use) < LEAK_STEPS and all(b - a > noise_bytes for a, b in itertools.pairwise(in_use))


def leak(in_use: Sequence[int], noise_bytes: int) -> int:
    """Bytes by which memory grows per step, from what was in use after each step since the warm-up; 0 if the growth is
    not steady, does not exceed `noise_bytes`, or there are too few steps to tell.

    The slope is the median of those between all pairs of steps (Theil and Sen: P. K. Sen, JASA 63, 1968), which an
    allocator that gives memory back once does not bend. A single jump bends it, but is no growth at the median step.
    """
    if len(in_use) < LEAK_STEPS:
        return 0
    points = enumerate(in_use)
    slope = statistics.median((b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(points, 2))
    usual = statistics.median(b - a for a, b in itertools.pairwise(in_use))
    return int(slope) if min(slope, usual) > noise_bytes else 0
