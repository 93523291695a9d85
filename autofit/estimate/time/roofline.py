"""From the work of a step to its time: a roofline (Williams, Waterman and Patterson 2009)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autofit.core.device.work_kinds import FRESH, INDEX, KINDS, LAUNCH
from autofit.core.prediction import StepWork
from autofit.estimate.version import ESTIMATOR_VERSION

if TYPE_CHECKING:
    from autofit.estimate.time.op_costs import Costs

Features = NDArray[np.float64]
NEAR_BYTES, FAR_BYTES = 4 * 1024**2, 64 * 1024**2
"""An operation that moves no more than the first finds it in the device's caches, one that moves more than the second
does not; between them its bytes are split by the logarithm. Last levels hold 16 to 64 MiB (an H100's 50)."""
FRESH_BYTES = 16 * 1024**2
"""From this size on the C library gives a freed block back to the system, which clears its pages for the next: above
32 MiB always (DEFAULT_MMAP_THRESHOLD_MAX of glibc's malloc.c), somewhat smaller ones at the end of the heap."""
WAITING_ERROR = 0.5
"""Relative error of the seconds that transfers and the host's part of an update are guessed to take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A device's speed, as seconds per unit of work."""

    seconds_per: tuple[float, ...]
    """The seconds of each of `KINDS`, in their order."""
    processor: bool = False
    """Whether the device is its own host, so that nothing hides the time it takes to launch an operation."""
    calibrated_on: int = 0
    """Number of trials that the rates were fitted to; 0 for a guess."""
    relative_error: float = 0.5
    """Median relative error on held-out trials, or the uncertainty of the guess."""
    transfers: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Seconds per byte of each kind of transfer (`core.device.work_kinds.TRANSFERS`)."""
    waiting: float = 1.0
    """Seconds that the arithmetic waits for transfers and for the host, over those that `transfers` tells."""
    waiting_error: float | None = None
    """Median relative error of those seconds on held-out trials; None where no trial waited."""
    stand_in: str | None = None
    """What a guess is taken from, and why, where it is neither the device's own data sheet nor its number of cores."""

    def per(self, kind: str) -> float:
        """Seconds per unit of one kind."""
        return self.seconds_per[INDEX[kind]]

    def as_array(self) -> Features:
        """The seconds per unit [kinds]."""
        return np.array(self.seconds_per)

    def waiting_share(self, work: StepWork) -> float:
        """The part of the predicted time of `work` in which the arithmetic waits."""
        return self.waiting * waits(work, self) / seconds(work, self)

    def error_of(self, work: StepWork) -> float:
        """Expected relative error of the predicted time of `work`."""
        waits = max(WAITING_ERROR, self.relative_error) if self.waiting_error is None else self.waiting_error
        share = self.waiting_share(work)
        return (1.0 - share) * self.relative_error + share * waits

    def times(self, ratios: Features) -> Rates:
        """These rates, each multiplied by its ratio, of `ratios` [kinds]."""
        return replace(self, seconds_per=tuple(map(float, self.as_array() * ratios)))


def step_work(
    costs: Iterable[Costs],
    update: Costs,
    prior: Rates,
    *,
    operation: float = 1.0,
    dispatched: float = 0.0,
    transfers: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {}),
) -> StepWork:
    """The sum of the operations of the micro-steps and of the update. On an accelerator each counts by its arithmetic
    or by its bytes, whichever takes longer according to `prior`, a guess that no trial changes. On a CPU it counts by
    both: a matrix product first packs its operands into blocks (Goto and van de Geijn 2008, "Anatomy of
    High-Performance Matrix Multiplication"), which no arithmetic hides.

    `operation` is each operation's host time in units of a usual one's, `dispatched` is host time besides, in the same
    units; `transfers` are bytes by kind (of transfers that overlap with the arithmetic, of those that it waits for).
    """
    steps = sum((_amounts(cost, prior, operation) for cost in costs), np.zeros(len(KINDS)))
    steps[INDEX[LAUNCH]] += dispatched
    of_update = _amounts(update, prior, operation)
    return StepWork(
        amounts=_named(steps + of_update),
        update=_named(of_update),
        estimator=ESTIMATOR_VERSION,
        beside=transfers[0],
        waits=transfers[1],
    )


def _amounts(cost: Costs, prior: Rates, operation: float) -> Features:
    """How much of each kind some operations are [kinds]."""
    of_flops, near, far, called = cost.kinds.T
    flops, moved = cost.flops, cost.bytes
    share_far = np.clip(np.log(np.maximum(moved, 1.0) / NEAR_BYTES) / np.log(FAR_BYTES / NEAR_BYTES), 0.0, 1.0)
    if not prior.processor:
        rates = prior.as_array()
        per_byte = (1.0 - share_far) * rates[near] + share_far * rates[far]
        by_flops = flops * rates[of_flops] > moved * per_byte
        flops, moved = np.where(by_flops, flops, 0.0), np.where(by_flops, 0.0, moved)
    amounts: Features = np.zeros(len(KINDS))
    amounts += np.bincount(of_flops, cost.times * flops, len(KINDS))
    amounts += np.bincount(near, cost.times * moved * (1.0 - share_far), len(KINDS))
    amounts += np.bincount(far, cost.times * moved * share_far, len(KINDS))
    amounts[INDEX[LAUNCH]] += operation * cost.times.sum()
    if prior.processor:
        amounts += np.bincount(called, cost.times * (called != INDEX[LAUNCH]), len(KINDS))
        amounts[INDEX[FRESH]] += float(cost.times @ np.where(cost.made >= FRESH_BYTES, cost.made, 0.0))
    return amounts


def _named(amounts: Features) -> dict[str, float]:
    return {kind: float(amount) for kind, amount in zip(KINDS, amounts, strict=True) if amount}


def seconds(work: StepWork, rates: Rates) -> float:
    """Time of the work: the slowest of the device, its host's launches and the transfers that overlap with both, and
    then what it waits for. A processor is its own host, which hides nothing."""
    return without_waiting(work, rates) + rates.waiting * waits(work, rates)


def micro_step_seconds(work: StepWork, rates: Rates, accumulation: int) -> float:
    """Time of one of the work's `accumulation` micro-steps, transfers included."""
    return max(seconds(work, rates) - seconds(work.of_update, rates), 0.0) / accumulation


def without_waiting(work: StepWork, rates: Rates) -> float:
    """Seconds in which the device computes, or moves what it does not wait for."""
    return max(float(parts(work, rates).sum()), _transferred(work.beside, rates))


def waits(work: StepWork, rates: Rates) -> float:
    """Seconds that it waits, as `Rates.transfers` tells them."""
    return _transferred(work.waits, rates)


def _transferred(moved: Mapping[str, float], rates: Rates) -> float:
    """Seconds of transfers, given in bytes by kind."""
    return math.fsum(size * rates.transfers[kind] for kind, size in moved.items())


def waits_for_launches(work: StepWork, rates: Rates) -> bool:
    """Whether the host launches operations more slowly than the device does them: a faster device is then no faster."""
    return not rates.processor and float(parts(work, rates)[INDEX[LAUNCH]]) > 0.0


def parts(work: StepWork, rates: Rates) -> Features:
    """Seconds that each rate contributes to the time; 0 for what is hidden."""
    parts = np.array([work.amounts.get(kind, 0.0) for kind in KINDS]) * rates.as_array()
    if not rates.processor:
        launch = INDEX[LAUNCH]
        launching = parts[launch]
        parts[launch] = 0.0
        if parts.sum() < launching:
            parts[:] = 0.0
            parts[launch] = launching
    return parts
