"""A check of the self-test, as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autofit.operations.self_test.bench import Bench
from autofit.operations.self_test.finding import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing to find out."""

    name: str
    shows: str
    """What it is for, in one sentence."""
    run: Callable[[Bench, float], Finding]
    """Called with the seconds that it may take; whatever it raises is a failure of this check alone."""
    technique: bool = False
    """Whether it is one value of one axis."""
    most_seconds: float = 45.0
    """With more than this it hangs."""
