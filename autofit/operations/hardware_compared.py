"""What each hardware would give for one workload, measured or predicted, side by side, and what its tokens cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from autofit.catalog.hardware import card
from autofit.core.errors import NothingFits, NotMeasured, UsageError
from autofit.core.frontier import Recommendation
from autofit.core.lattice import Config
from autofit.core.workload import Goal
from autofit.estimate.estimate import Estimate
from autofit.operations.recommendation import Asked, recommend
from autofit.planning.requests import WorkloadOptions
from autofit.prediction.estimating import Estimation
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
        return _million(price_per_hour * devices, speed)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCard:
    """One config on one card of the catalog, predicted."""

    name: str
    estimate: Estimate | None
    reason: str | None
    """Why there is no estimate: what cannot work on this card."""

    def cost(self, price_per_hour: float | None) -> float | None:
        """As of `OnHardware`."""
        speed = None if self.estimate is None else self.estimate.tokens_per_second
        if self.estimate is None or speed is None or price_per_hour is None:
            return None
        return _million(price_per_hour * self.estimate.devices, speed)

    @property
    def fits(self) -> bool:
        """Whether it fits with room for what predictions are off."""
        return self.estimate is not None and self.estimate.likely_fits

    def to_json(self, price_per_hour: float | None = None) -> dict[str, Any]:
        found = None if self.estimate is None else self.estimate.short_json()
        cost = self.cost(price_per_hour) if self.fits else None
        return {"hardware": self.name, "estimate": found, "reason": self.reason, "cost_per_million_tokens": cost}


def estimate_each(
    asked: WorkloadOptions,
    configs: Mapping[str, Config],
    *,
    memory_limit_bytes: int | None = None,
    store: str | None = None,
    report: Callable[[int], None] = lambda done: None,
) -> list[OnCard]:
    """What each card's config of `configs` takes on it: first those that it is likely to fit, the smallest first.
    `report` is called with how many are done. Raises `UsageError` for what can be trained on none of them."""
    rows = []
    for done, (name, config) in enumerate(configs.items(), start=1):
        found: Estimate | None = None
        reason: str | None = None
        try:
            one = Estimation.of(asked, config, hardware=name, memory_limit_bytes=memory_limit_bytes, store=store)
            found = one.estimate()
        except UsageError as error:
            reason = str(error)
        rows.append(OnCard(name=name, estimate=found, reason=reason))
        report(done)
    if all(row.estimate is None for row in rows):
        raise UsageError(rows[0].reason or "no card was named")
    return sorted(rows, key=_size)


def _size(row: OnCard) -> tuple[bool, bool, int]:
    """Those that it fits first, of these the smallest first, of the others the largest."""
    size = card(row.name).memory_bytes
    return row.estimate is None, not row.fits, size if row.fits else -size


def _million(price_per_hour: float, tokens_per_second: float) -> float:
    """The price of a million tokens at so many a second."""
    return price_per_hour / 3600 / tokens_per_second * 1e6


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
