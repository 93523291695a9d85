"""The area that a set of (memory, speed) points dominates."""

from __future__ import annotations

from collections.abc import Iterable


def hypervolume(points: Iterable[tuple[float, float]], reference: tuple[float, float]) -> float:
    """The area of all (bytes, tokens per second) that some point dominates and that dominate the reference point: less
    memory and more speed are better. Exact; O(n log n).

    In two dimensions it is the area under a staircase (Zitzler and Thiele 1998): in order of memory, each point that is
    faster than all lighter ones adds a strip from its memory to the reference's.
    """
    most, slowest = reference
    area, height = 0.0, slowest
    for memory, speed in sorted(points):
        if memory < most and speed > height:
            area += (most - memory) * (speed - height)
            height = speed
    return area
