"""From the work of a step to its time: a roofline whose rates are a card's peaks, or fitted to measured trials."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autofit.catalog.hardware import cards
from autofit.hardware import Hardware
from autofit.outcome import StepWork

if TYPE_CHECKING:
    from autofit.estimate.work import Costs

Features = NDArray[np.float64]
MATMUL_EFFICIENCY = 0.65
"""Share of a data sheet's dense peak that large matrix products reach; a guess that calibration replaces."""
BANDWIDTH_EFFICIENCY = 0.8
"""Share of a data sheet's bandwidth that elementwise kernels reach; a guess that calibration replaces."""
OPERATION_SECONDS = 6e-6
"""What PyTorch spends on the host to start one operation; a guess that calibration replaces."""
HOST_BYTES_PER_SECOND = 25e9
"""Between pinned memory and the device: a guess, that packets leave 25 of the 31.5 GB/s that PCIe 4.0 x16 has each way.
"""
PRIOR_WEIGHT = 0.3
"""How much a rate's relative distance from the guess counts against a trial's relative error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device does in a second, as seconds per unit."""

    per_flop: float
    """Of matrix products in 16 bits."""
    per_wide_flop: float
    """Of matrix products in fp32."""
    per_byte: float
    """Of operations that memory bounds."""
    per_operation: float
    """Of the host, per operation."""
    calibrated_on: int = 0
    """Trials that the rates were fitted to; 0 for a guess from data sheets."""
    relative_error: float = 0.5
    """Median relative error on those trials, or the uncertainty of the guess."""

    def as_array(self) -> Features:
        """The four rates, in the order of `features`."""
        return np.array([self.per_flop, self.per_wide_flop, self.per_byte, self.per_operation])


def prior(hardware: Hardware) -> Rates | None:
    """What the data sheet says of a device's speed; None for one that is not in the catalog, or whose peak is not."""
    found = next((card for card in cards() if card.name == hardware.name), None)
    if found is None or found.training_peak_flops is None:
        return None
    peak = found.training_peak_flops
    return guess(flops=peak, wide_flops=found.peak_flops.get("fp32", peak), bandwidth=found.bandwidth_bytes_per_second)


def guess(*, flops: float, wide_flops: float, bandwidth: float) -> Rates:
    """Rates from a card's peaks: FLOP/s in 16 bits and in fp32, bytes per second."""
    return Rates(
        per_flop=1.0 / (MATMUL_EFFICIENCY * flops),
        per_wide_flop=1.0 / (MATMUL_EFFICIENCY * wide_flops),
        per_byte=1.0 / (BANDWIDTH_EFFICIENCY * bandwidth),
        per_operation=OPERATION_SECONDS,
    )


def step_work(costs: Iterable[Costs], rates: Rates, *, moved_bytes: float) -> StepWork:
    """The sum of operations; each counts by its arithmetic or by its bytes, whichever `rates` say takes longer."""
    total = np.zeros(4)
    for cost in costs:
        per_flop = np.where(cost.wide, rates.per_wide_flop, rates.per_flop)
        by_flops = cost.flops * per_flop > cost.bytes * rates.per_byte
        total[0] += float(cost.times @ np.where(by_flops & ~cost.wide, cost.flops, 0.0))
        total[1] += float(cost.times @ np.where(by_flops & cost.wide, cost.flops, 0.0))
        total[2] += float(cost.times @ np.where(by_flops, 0.0, cost.bytes))
        total[3] += float(cost.times.sum())
    flops, wide_flops, moved, operations = (float(value) for value in total)
    return StepWork(
        flops=flops, wide_flops=wide_flops, bytes=moved, operations=operations, moved_bytes=float(moved_bytes)
    )


def features(work: StepWork) -> Features:
    """What the four rates are applied to, in their order."""
    return np.array([work.flops, work.wide_flops, work.bytes, work.operations])


def seconds(work: StepWork, rates: Rates, *, overlapping_host: bool) -> float:
    """Time of the work: an accelerator hides the host's part behind its own unless the host is slower."""
    found = features(work)
    device = float(found[:3] @ rates.as_array()[:3])
    host = float(found[3] * rates.per_operation)
    together = max(device, host) if overlapping_host else device + host
    return together + work.moved_bytes / HOST_BYTES_PER_SECOND


def calibrated(prior: Rates, measured: Sequence[tuple[StepWork, float]]) -> Rates:
    """Rates fitted to measured (work, seconds): least squares of relative errors, held near the prior.

    Ridge regression (Hoerl and Kennard 1970) on each rate's ratio to its prior; no rate falls below a tenth of it.
    """
    if not measured:
        return prior
    known = prior.as_array()
    rows = np.array([features(work) * known / taken for work, taken in measured])
    ridge = PRIOR_WEIGHT * np.eye(4)
    left = np.vstack([rows, ridge])
    right = np.concatenate([np.ones(len(rows)), np.full(4, PRIOR_WEIGHT)])
    ratios = np.maximum(np.linalg.lstsq(left, right, rcond=None)[0], 0.1)
    error = float(np.median(np.abs(rows @ ratios - 1.0)))
    fitted = known * ratios
    return Rates(
        per_flop=float(fitted[0]),
        per_wide_flop=float(fitted[1]),
        per_byte=float(fitted[2]),
        per_operation=float(fitted[3]),
        calibrated_on=len(rows),
        relative_error=error,
    )
