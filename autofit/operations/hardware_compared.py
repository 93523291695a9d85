"""What each hardware would give for one workload, measured or predicted, side by side, and what its tokens cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autofit.catalog.hardware import card
from autofit.core.errors import NothingFits, NotMeasured, UsageError
from autofit.core.frontier import Recommendation
from autofit.core.lattice import Config
from autofit.core.outcome import Fits, OutOfMemory, Trial
from autofit.core.verdict import verdict
from autofit.core.workload import Goal
from autofit.estimate.estimate import Estimate
from autofit.operations.recommendation import WorkloadQuestion, recommend
from autofit.planning.requests import WorkloadOptions
from autofit.prediction.estimate_cache import readable
from autofit.prediction.estimation import Estimation
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
    """Why there is no recommendation; beside one, why the search for it did not succeed."""

    def cost(self, price_per_hour: float | None) -> float | None:
        """The price of a million tokens; None where that of a device's hour or the speed is not known."""
        if (answer := self.recommendation) is None:
            return None
        return _price_of_million_tokens(price_per_hour, answer.point.tokens_per_second, answer.workload.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCard:
    """One config on one card of the catalog: predicted and, where it was, measured."""

    name: str
    estimate: Estimate | None
    reason: str | None
    """Why there is no estimate; beside one that does not fit, why several of the card cannot share it."""
    trial: Trial | None = None
    """The trial that settles the config there under the limit (`core.verdict`); None where none does."""

    @property
    def tokens_per_second(self) -> float | None:
        """Of all devices together: as measured, else as predicted; None where neither is known."""
        source = self.estimate if self.trial is None else self.trial.measurement
        return None if source is None else source.tokens_per_second

    @property
    def device_bytes(self) -> int | None:
        """Of each device: as measured, else as predicted."""
        source = (self.trial and self.trial.measurement) or self.estimate
        return None if source is None else source.device_bytes

    @property
    def devices(self) -> int:
        return 1 if self.estimate is None else self.estimate.devices

    @property
    def fits(self) -> bool:
        """Whether it did or, where it has not run, whether it fits with room for what predictions are off."""
        if self.estimate is None:
            return False
        if self.trial is not None:
            return self.trial.fits_within(self.estimate.memory_limit_bytes)
        return self.estimate.likely_fits

    def cost(self, price_per_hour: float | None) -> float | None:
        """The price of a million tokens (`OnHardware.cost`)."""
        return _price_of_million_tokens(price_per_hour, self.tokens_per_second, self.devices)

    def seconds(self, tokens: int | None) -> float | None:
        """The time that so many tokens take."""
        speed = self.tokens_per_second
        return None if tokens is None or speed is None else tokens / speed

    def to_json(self, price_per_hour: float | None = None, tokens: int | None = None) -> dict[str, Any]:
        return {
            "hardware": self.name,
            "devices": None if self.estimate is None else self.devices,
            "provenance": "predicted" if self.trial is None else "measured",
            "estimate": None if self.estimate is None else self.estimate.short_json(),
            "trial": None if self.trial is None else self.trial.outcome.to_json(),
            "reason": self.reason,
            "cost_per_million_tokens": self.cost(price_per_hour) if self.fits else None,
            "seconds": self.seconds(tokens) if self.fits else None,
        }


def estimate_cards(
    options: WorkloadOptions,
    configs: Mapping[str, Config],
    *,
    memory_limit_bytes: int | None = None,
    spreads: bool = True,
    report: Callable[[int], None] = lambda done: None,
) -> list[OnCard]:
    """What each card's config takes on it, the smallest that it is likely to fit first. Where one device does not hold
    it and it `spreads`, the fewest of that card are named that do (`_on_several`).

    `report` is called with how many are done. Raises `UsageError` for what can be trained on none of them.
    """
    rows = []
    with readable(None) as opened:

        def row(of: WorkloadOptions, name: str, config: Config) -> OnCard:
            try:
                estimation = Estimation.of(of, config, hardware=name, memory_limit_bytes=memory_limit_bytes)
                estimate = estimation.estimate()
            except UsageError as error:
                return OnCard(name=name, estimate=None, reason=str(error))
            key = estimation.job.workload.key
            settled = None if opened is None else _settling_trial(opened, name, config, key, memory_limit_bytes)
            return OnCard(name=name, estimate=estimate, reason=None, trial=settled)

        for done, (name, config) in enumerate(configs.items(), start=1):
            alone = row(options, name, config)
            rows.append(_on_several(alone, options, config, row) if spreads and options.devices == 1 else alone)
            report(done)
    if all(on_card.estimate is None for on_card in rows):
        raise UsageError(rows[0].reason or "no card was named")
    return sorted(rows, key=_size)


def _settling_trial(store: Store, name: str, config: Config, workload_key: str, limit: int | None) -> Trial | None:
    """The trial that settles the config on hardware of this name, under the newest stack that has one."""
    for hardware in (stored for stored in store.hardware() if stored.name == name):
        for stack in store.stacks(hardware.key, workload_key):
            trials_by_config = store.attempts(hardware_key=hardware.key, stack_key=stack.key, workload_key=workload_key)
            settled = verdict(trials_by_config.get(config, []), hardware.memory_bytes if limit is None else limit)
            if settled is not None and isinstance(settled.outcome, Fits | OutOfMemory):
                return settled
    return None


SHARDINGS = ("fsdp", "zero3")
"""What shares weights, gradients and optimizer states among devices, in the order in which it is tried."""
SEVERAL = (2, 4, 8)
"""Devices as machines have them."""


def _on_several(
    row: OnCard, options: WorkloadOptions, config: Config, of: Callable[[WorkloadOptions, str, Config], OnCard]
) -> OnCard:
    """The row `of` the fewest devices of this card that the sharded config fits; else the same one."""
    alone = row.estimate
    if alone is None or row.fits:
        return row
    reasons = []
    for devices in SEVERAL:
        if alone.device_bytes > devices * alone.memory_limit_bytes:  # also if everything could be shared
            continue
        for sharding in SHARDINGS:
            shared = of(replace(options, devices=devices), row.name, config.replace(sharding=sharding))
            if shared.fits:
                return shared
            reasons.append(shared.reason)
    return replace(row, reason=f"several cannot share it: {reasons[0]}") if reasons and all(reasons) else row


def _size(row: OnCard) -> tuple[bool, bool, int, int]:
    """A sort key: first the cards that it fits, the fewest and smallest of them; then the others, the largest first."""
    size = card(row.name).memory_bytes
    return row.estimate is None, not row.fits, row.devices, size if row.fits else -size


def _price_of_million_tokens(per_hour: float | None, tokens_per_second: float | None, devices: int) -> float | None:
    if per_hour is None or tokens_per_second is None:
        return None
    return per_hour * devices / 3600 / tokens_per_second * 1e6


def compare_hardware(
    asked: WorkloadQuestion,
    names: Collection[str] | None = None,
    *,
    goal: Goal | None = None,
    memory_limit_bytes: int | None = None,
    store: Store,
) -> list[OnHardware]:
    """The recommendation on each hardware (None: on all that trials ran on), the fastest first, what has none last."""
    measured = {hardware.name: hardware.memory_bytes for hardware in reversed(store.hardware())}
    rows = []
    for name in measured if names is None else names:
        recommendation, reason = None, "this workload has not been measured here"
        try:
            if name in measured:
                limit = None if memory_limit_bytes is None else min(memory_limit_bytes, measured[name])
                recommendation = recommend(asked, hardware=name, goal=goal, memory_limit_bytes=limit, store=store)
        except NothingFits as error:
            reason = str(error)
        except NotMeasured:
            pass
        why = None if recommendation else reason
        rows.append(OnHardware(name=name, memory_bytes=measured.get(name), recommendation=recommendation, reason=why))
    return sorted(rows, key=lambda r: -r.recommendation.point.tokens_per_second if r.recommendation else 1.0)


def price_of_an_hour(text: str) -> float:
    """A price as a number. Raises `UsageError`."""
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 < price < 1e6:
        raise UsageError(f"price {text!r} is not understood: write a number such as 2.50, the price of one hour")
    return price
