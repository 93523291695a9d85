"""Time limits for what a test lets run into them: short ones first, so that only a slow machine waits for long ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(attempt: Callable[[float], T], shows: Callable[[T], bool], *limits: float) -> tuple[T, float]:
    """What `attempt` gives under the first of the limits, in seconds, under which it shows what a test is about; else
    under the last one. And that limit."""
    for seconds in limits:
        found = attempt(seconds)
        if shows(found):
            break
    return found, seconds
