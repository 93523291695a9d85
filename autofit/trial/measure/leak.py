"""Whether each step leaves memory behind, which would end a run of thousands of steps."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

LEAK_STEPS = 6
"""With fewer steps, a heap that is settling looks like one that grows."""
NORMAL_DEVIATION = 1.0 / statistics.NormalDist().inv_cdf(0.75)
"""Standard deviation of a normal variable over its median absolute deviation."""


def may_leak(in_use: Sequence[int], noise_bytes: int, *, most: int) -> bool:
    """Whether memory has grown by more than `noise_bytes` at every step so far, in too few steps for `leak` to tell,
    and the `most` that there is time for suffice for that."""
    too_few = len(in_use) < LEAK_STEPS <= most
    return too_few and all(b - a > noise_bytes for a, b in itertools.pairwise(in_use))


def leak(in_use: Sequence[int], noise_bytes: int) -> int:
    """Bytes by which memory grows per step, from what was in use after each step since the warm-up; 0 if the growth is
    not steady, does not exceed `noise_bytes` or what scatter explains, or there are too few steps to tell.

    The slope is the median of those between all pairs of steps (Theil and Sen: P. K. Sen, JASA 63, 1968), which an
    allocator that gives memory back once does not bend. A single jump bends it, but is no growth at the median step. It
    must exceed 0 by four standard errors: on a CPU, what the heap keeps differs by tens of MiB from step to step, and
    of thousands of trials hardly one may be accused of a leak by that.
    """
    if len(in_use) < LEAK_STEPS:
        return 0
    slope = statistics.median((b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(enumerate(in_use), 2))
    typical = statistics.median(b - a for a, b in itertools.pairwise(in_use))
    least = max(noise_bytes, 4.0 * _standard_error(in_use, slope))
    return int(slope) if slope > least and typical > noise_bytes else 0


def _standard_error(in_use: Sequence[int], slope: float) -> float:
    """The standard error of a slope over equally spaced steps, from how they scatter about it: that of least squares,
    with a deviation that a few outliers do not raise."""
    count = len(in_use)
    level = [size - slope * step for step, size in enumerate(in_use)]
    middle = statistics.median(level)
    deviation = NORMAL_DEVIATION * statistics.median(abs(size - middle) for size in level)
    return deviation * math.sqrt(12 / (count * (count**2 - 1)))
