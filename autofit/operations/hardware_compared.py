"""What each hardware would give for one workload, side by side, and what its tokens cost."""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from autofit.core.errors import NothingFits, NotMeasured, UsageError
from autofit.core.frontier import Recommendation
from autofit.core.workload import Goal
from autofit.operations.recommendation import Asked, recommend
from autofit.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class OnHardware:
    """One workload on one kind of hardware."""

    name: str
    memory_bytes: int | None
    """Of one device; None where nothing was measured."""
    recommendation: Recommendation | None
    """None where nothing fits, or nothing was measured."""
    reason: str | None
    """Why there is no recommendation."""

    def cost(self, price_per_hour: float | None) -> float | None:
        """Of a million tokens, in the currency of the price, which is that of one device; None where that or the speed
        is not known. The speed is that of all devices together."""
        if self.recommendation is None or price_per_hour is None:
            return None
        speed, devices = self.recommendation.point.tokens_per_second, self.recommendation.workload.devices
        return price_per_hour * devices / 3600 / speed * 1e6


def compare_hardware(
    asked: Asked,
    names: Collection[str] | None = None,
    *,
    goal: Goal | None = None,
    memory_limit_bytes: int | None = None,
    store: Store,
) -> list[OnHardware]:
    """The recommendation on each hardware (None: on all that trials ran on), the fastest first; what has none comes
    last."""
    measured = {hardware.name: hardware.memory_bytes for hardware in reversed(store.hardware())}
    rows = []
    for name in measured if names is None else names:
        found: Recommendation | None = None
        reason: str | None = "this workload has not been measured here"
        with suppress(NotMeasured):
            if name in measured:
                found, reason = _asked(asked, name, goal, memory_limit_bytes, store)
        rows.append(OnHardware(name=name, memory_bytes=measured.get(name), recommendation=found, reason=reason))
    return sorted(rows, key=_slowness)


def _asked(
    asked: Asked, name: str, goal: Goal | None, limit: int | None, store: Store
) -> tuple[Recommendation | None, str | None]:
    """The recommendation, or why nothing fits."""
    try:
        return recommend(asked, hardware=name, goal=goal, memory_limit_bytes=limit, store=store), None
    except NothingFits as error:
        return None, str(error)


def price_of_an_hour(text: str) -> float:
    """A price as a number. Raises `UsageError`."""
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 < price < 1e6:
        raise UsageError(f"price {text!r} is not understood: write a number such as 2.50, the price of one hour")
    return price


def _slowness(row: OnHardware) -> float:
    return 1.0 if row.recommendation is None else -row.recommendation.point.tokens_per_second
