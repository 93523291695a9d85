"""What each hardware would give for one workload, side by side, and what its tokens cost."""

from __future__ import annotations

from dataclasses import dataclass

from autofit.core.errors import NothingFits, NotMeasured
from autofit.core.frontier import Recommendation
from autofit.core.hardware import Hardware
from autofit.core.workload import Goal
from autofit.operations.recommendation import Asked, recommend
from autofit.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class OnHardware:
    """One workload on one kind of hardware."""

    hardware: Hardware
    recommendation: Recommendation | None
    """None where nothing fits, or nothing was measured."""
    reason: str | None
    """Why there is no recommendation."""


def compare_hardware(asked: Asked, *, goal: Goal | None = None, store: Store) -> list[OnHardware]:
    """The recommendation on all hardware that trials ran on, the fastest first; what has none comes last."""
    rows, seen = [], set()
    for hardware in store.hardware():
        if hardware.name in seen:
            continue
        seen.add(hardware.name)
        found, reason = None, None
        try:
            found = recommend(asked, hardware=hardware.name, goal=goal, store=store)
        except NotMeasured:
            reason = "this workload has not been measured here"
        except NothingFits as error:
            reason = str(error)
        rows.append(OnHardware(hardware=hardware, recommendation=found, reason=reason))
    return sorted(rows, key=_slowness)


def _slowness(row: OnHardware) -> float:
    return 1.0 if row.recommendation is None else -row.recommendation.point.tokens_per_second


def cost_per_million_tokens(tokens_per_second: float, *, price_per_hour: float, devices: int) -> float:
    """In the currency of the price, which is that of one device for an hour; speed is that of all devices together."""
    return price_per_hour * devices / 3600 / tokens_per_second * 1e6
