"""From the work of a step to its time: a roofline whose rates are a device's peaks, or fitted to measured trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import geometric_mean
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autofit.catalog.hardware import Card, cards, named
from autofit.core.device.work_kinds import FLOP, FRESH, INDEX, KINDS, LAUNCH, OPERATION, QUANTISE_8BIT, format_of, unit
from autofit.core.hardware import Hardware
from autofit.core.outcome import StepWork
from autofit.estimate.time.transfers import seconds_per_byte
from autofit.estimate.version import ESTIMATOR_VERSION

if TYPE_CHECKING:
    from autofit.estimate.time.op_costs import Costs

Features = NDArray[np.float64]
MATMUL_EFFICIENCY = 0.65
"""Share of a data sheet's dense peak that large matrix products reach; a guess that calibration replaces."""
BANDWIDTH_EFFICIENCY = 0.8
"""Share of a data sheet's bandwidth that elementwise kernels reach; a guess that calibration replaces."""
OPERATION_SECONDS = 2e-5
"""Host time that PyTorch takes to launch one operation of eager transformers with PEFT; a guess that calibration
replaces. LoRA of Qwen-1.8B on an A100 takes 0.125 s a micro-step with 256 tokens and with 512 (README.md of
QwenLM/Qwen), for some 5,900 operations: it does nothing but wait for launches (`benchmarks/published.py`)."""
CORE_FLOPS, CORE_WIDE_FLOPS, CORE_BANDWIDTH, CORE_OPERATION_SECONDS = 180e9, 85e9, 6.4e9, 25e-6
"""Per core of any CPU: FLOP/s of matrix products in 16 bits and in fp32, bytes/s between its caches and memory; and
seconds per operation, thread synchronisation included. Calibration on the configs of
benchmarks/recorded/cpu-2c-every-axis.jsonl gives these for an AMD EPYC with bf16 arithmetic: for any other they are
orders of magnitude only, which calibration replaces."""
GUESS_ERROR = 1.0
"""Relative error of a time guessed from the number of cores alone, or from other cards of like compute capability,
which differ by up to a factor of 3."""
ATTENTION_FACTOR = 4.0
"""How many FLOPs of an fp32 matrix product take a CPU as long as one FLOP of PyTorch's fused attention, whatever the
format: 17 to 38 GFLOP/s against 90 on one core of an AMD EPYC (torch 2.13, 128 and 512 tokens, width 64)."""
BLOCKWISE_FACTOR = 7.0
"""How many ordinary bytes take a CPU as long as one byte of bitsandbytes' quantisation, which looks every value up in a
table: 1.0 GB/s against 6.8 of a multiplication by a scalar on 2 cores of an AMD EPYC (bitsandbytes 0.50)."""
DEQUANTISED_FACTOR = 2.0
"""The same for bitsandbytes' dequantisation, which looks up codes: between 1 and 4 the configs of every-axis show no
difference."""
NEAR_FACTOR = 0.5
"""The same for an operation that finds most of what it reads in the CPU's caches."""
NEAR_BYTES, FAR_BYTES = 4 * 1024**2, 64 * 1024**2
"""An operation that moves no more than the first finds it in the device's caches, one that moves more than the second
does not; between them its bytes are split in proportion to the logarithm. Last levels hold 16 to 64 MiB (an AMD EPYC's
32 MiB for the cores that share it, an H100's 50 MiB)."""
FRESH_BYTES = 16 * 1024**2
"""From this size on the C library gives a freed block back to the system, which clears its pages before it hands them
out again: blocks above 32 MiB always (DEFAULT_MMAP_THRESHOLD_MAX of glibc's malloc.c), somewhat smaller ones when they
end the heap."""
PAGES_BYTES_PER_SECOND = 2.5e9
"""Of new pages: 4 KiB in some 1.6 us, cleared and mapped, on a Zen 5; a guess for others, which a probe replaces."""
PRIOR_WEIGHT = 0.3
"""Weight of a rate's relative distance from the scaled guess against a trial's relative error."""
WAITING_WEIGHT = 0.1
"""The same for the factor of what is waited for: a trial's time is off by some 5 %, the guess by `WAITING_ERROR`."""
LEAST_RATIO = 0.1
"""No rate falls below this share of the scaled guess, whatever a few trials suggest."""
WAITING_ERROR = 0.5
"""Relative error of the seconds that transfers and the host's part of an update are guessed to take."""
ROUNDS = 5
"""Iterations in which the fit may revise which trials are host-bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A device's speed, as seconds per unit of work."""

    seconds_per: tuple[float, ...]
    """Of each of `KINDS`, in their order."""
    processor: bool = False
    """Whether the device is its own host, so that nothing hides the time it takes to launch an operation."""
    calibrated_on: int = 0
    """Number of trials that the rates were fitted to; 0 for a guess."""
    relative_error: float = 0.5
    """Median relative error on held-out trials, or the uncertainty of the guess."""
    transfers: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Seconds per byte of each kind of transfer (`core.work_kinds.TRANSFERS`)."""
    waiting: float = 1.0
    """Seconds that the arithmetic waits for transfers and for the host, over those that `transfers` tells."""
    waiting_error: float | None = None
    """Median relative error of those seconds on held-out trials; None where no trial waited."""
    stand_in: str | None = None
    """What a guess is taken from in place of the device's own data sheet, and why; None where it is the device's own,
    or its number of cores."""

    def per(self, kind: str) -> float:
        """Seconds per unit of one kind."""
        return self.seconds_per[INDEX[kind]]

    def as_array(self) -> Features:
        """The seconds per unit [kinds]."""
        return np.array(self.seconds_per)

    def waiting_share(self, work: StepWork) -> float:
        """The part of the predicted time of `work` in which the arithmetic waits."""
        return self.waiting * _waits(work, self) / seconds(work, self)

    def error_of(self, work: StepWork) -> float:
        """Expected relative error of the predicted time of `work`."""
        waits = max(WAITING_ERROR, self.relative_error) if self.waiting_error is None else self.waiting_error
        share = self.waiting_share(work)
        return (1.0 - share) * self.relative_error + share * waits

    def times(self, ratios: Features) -> Rates:
        """Every rate multiplied by its own of `ratios` [kinds]."""
        return replace(self, seconds_per=tuple(map(float, self.as_array() * ratios)))


def prior(hardware: Hardware) -> Rates | None:
    """Rates from an accelerator's data sheet, or from a CPU's number of cores.

    An NVIDIA device that is not in the catalog, or whose entry lacks a figure, gets those of the cards of the nearest
    compute capability; None for any other such accelerator.
    """
    found = _of_device(hardware)
    return None if found is None else replace(found, transfers=seconds_per_byte(hardware))


def _of_device(hardware: Hardware) -> Rates | None:
    if hardware.kind == "cpu":
        return _of_cores(max(hardware.cores, 1))
    found = named(hardware.name)
    if found is None:
        return _of_like_cards(hardware, f"{hardware.name} is not in the catalog")
    missing = missing_figure(found)
    if missing is not None:
        return _of_like_cards(hardware, f"the catalog lacks {missing} of {hardware.name}")
    flops, wide_flops = found.training_peak_flops, found.peak_flops["fp32"]
    assert flops is not None, "it is not missing"
    return guess(
        flops=flops, wide_flops=wide_flops, bandwidth=found.bandwidth_bytes_per_second, emulates_bf16=not found.bf16
    )


def missing_figure(card: Card) -> str | None:
    """The first figure of those that the time model needs which the catalog lacks, in words; None if it has all."""
    if card.training_peak_flops is None:
        return "the 16-bit peak (peak_flops: bf16 or fp16)"
    if "fp32" not in card.peak_flops:
        return "the fp32 peak (peak_flops: fp32)"
    return None


def _of_like_cards(hardware: Hardware, why: str) -> Rates | None:
    """Rates from the mean figures of the NVIDIA cards whose compute capability is nearest to that of `hardware`."""
    if not hardware.is_nvidia:
        return None
    sheets = [card for card in cards() if card.vendor == "nvidia" and missing_figure(card) is None]
    own = float(hardware.capability or 0)
    nearest = min(sheets, key=lambda card: abs(float(card.capability) - own)).capability
    alike = [card for card in sheets if card.capability == nearest]
    found = guess(
        flops=geometric_mean(card.training_peak_flops or 0.0 for card in alike),
        wide_flops=geometric_mean(card.peak_flops["fp32"] for card in alike),
        bandwidth=geometric_mean(card.bandwidth_bytes_per_second for card in alike),
    )
    stand_in = f"cards of compute capability {nearest}, because {why}"
    return replace(found, relative_error=GUESS_ERROR, stand_in=stand_in)


def guess(*, flops: float, wide_flops: float, bandwidth: float, emulates_bf16: bool = False) -> Rates:
    """Rates from a card's peaks: FLOP/s in 16 bits and in fp32, bytes per second. Where bf16 is emulated, its products
    are taken to be as fast as those in fp32, in which they are made."""
    peaks = {"fp32": wide_flops, "fp16": flops, "bf16": wide_flops if emulates_bf16 else flops}

    def per(kind: str) -> float:
        if unit(kind) == OPERATION:
            return OPERATION_SECONDS
        if unit(kind) == FLOP:
            return 1.0 / (MATMUL_EFFICIENCY * peaks[format_of(kind) or "fp32"])
        return 1.0 / (BANDWIDTH_EFFICIENCY * bandwidth)

    return Rates(seconds_per=tuple(map(per, KINDS)))


def _of_cores(cores: int) -> Rates:
    """Rates of a CPU of which only the number of cores is known."""

    def per(kind: str) -> float:
        if unit(kind) == OPERATION:
            return CORE_OPERATION_SECONDS
        if kind == FRESH:
            return 1.0 / PAGES_BYTES_PER_SECOND
        if kind.startswith("attention"):
            return ATTENTION_FACTOR / (cores * CORE_WIDE_FLOPS)
        if unit(kind) == FLOP:
            return 1.0 / (cores * (CORE_WIDE_FLOPS if format_of(kind) == "fp32" else CORE_FLOPS))
        quantises, dequantises = kind == QUANTISE_8BIT, kind.startswith("dequantise")
        factor = BLOCKWISE_FACTOR if quantises else DEQUANTISED_FACTOR if dequantises else 1.0
        return (NEAR_FACTOR if kind.endswith("near") else factor) / (cores * CORE_BANDWIDTH)

    return Rates(seconds_per=tuple(map(per, KINDS)), processor=True, relative_error=GUESS_ERROR)


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
    or by its bytes, whichever takes longer according to `prior`; on a CPU by both: a matrix product first packs its
    operands into blocks (Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication"), which no
    arithmetic of its cores hides.

    The guess decides that, never fitted rates, so that a step's work does not depend on what the trials show.
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
    from autofit.estimate.time.op_costs import FAMILIES

    # For a family without arithmetic, any kind will do: its amounts are 0.
    flop_kinds = np.array([INDEX[family.flops or LAUNCH] for family in FAMILIES])[cost.families]
    places = [np.array([INDEX[f.bytes[i]] for f in FAMILIES])[cost.families] for i in (0, 1)]
    flops, moved = cost.flops, cost.bytes
    far = np.clip(np.log(np.maximum(moved, 1.0) / NEAR_BYTES) / np.log(FAR_BYTES / NEAR_BYTES), 0.0, 1.0)
    if not prior.processor:
        rates = prior.as_array()
        per_byte = (1.0 - far) * rates[places[0]] + far * rates[places[1]]
        by_flops = flops * rates[flop_kinds] > moved * per_byte
        flops, moved = np.where(by_flops, flops, 0.0), np.where(by_flops, 0.0, moved)
    found: Features = np.zeros(len(KINDS))
    found += np.bincount(flop_kinds, cost.times * flops, len(KINDS))
    found += np.bincount(places[0], cost.times * moved * (1.0 - far), len(KINDS))
    found += np.bincount(places[1], cost.times * moved * far, len(KINDS))
    found[INDEX[LAUNCH]] += operation * cost.times.sum()
    if prior.processor:
        called = np.array([INDEX[family.call or LAUNCH] for family in FAMILIES])[cost.families]
        calls = np.array([family.call is not None for family in FAMILIES])[cost.families]
        found += np.bincount(called, cost.times * calls, len(KINDS))
        found[INDEX[FRESH]] += float(cost.times @ np.where(cost.made >= FRESH_BYTES, cost.made, 0.0))
    return found


def _named(amounts: Features) -> dict[str, float]:
    return {kind: float(amount) for kind, amount in zip(KINDS, amounts, strict=True) if amount}


def seconds(work: StepWork, rates: Rates) -> float:
    """Time of the work: an accelerator hides the host's part behind its own unless the host is slower; transfers that
    overlap with both count only where they take longer."""
    return _without_waiting(work, rates) + rates.waiting * _waits(work, rates)


def micro_step_seconds(work: StepWork, rates: Rates, accumulation: int) -> float:
    """Time of one of the micro-steps of which the work has `accumulation`; what transfers take counts as theirs."""
    return max(seconds(work, rates) - seconds(work.of_update, rates), 0.0) / accumulation


def _without_waiting(work: StepWork, rates: Rates) -> float:
    return max(float(_parts(work, rates).sum()), _transferred(work.beside, rates))


def _waits(work: StepWork, rates: Rates) -> float:
    return _transferred(work.waits, rates)


def _transferred(moved: Mapping[str, float], rates: Rates) -> float:
    """Seconds of transfers, given in bytes by kind."""
    return math.fsum(size * rates.transfers[kind] for kind, size in moved.items())


def _parts(work: StepWork, rates: Rates) -> Features:
    """Seconds that each rate contributes to the time; 0 for what is hidden."""
    parts = np.array([work.amounts.get(kind, 0.0) for kind in KINDS]) * rates.as_array()
    if not rates.processor:
        launch = INDEX[LAUNCH]
        host = parts[launch]
        parts[launch] = 0.0
        if parts.sum() < host:
            parts[:] = 0.0
            parts[launch] = host
    return parts


def calibrated(
    prior: Rates,
    measured: Sequence[tuple[StepWork, float]],
    groups: Sequence[str] = (),
    only_waiting: Sequence[bool] = (),
) -> Rates:
    """Rates fitted to measured (work, seconds), with their relative error on held-out trials.

    That error is the median of the leave-one-out errors: how far the fit to all other trials misses each one. It counts
    one more error, the larger of the worst of them and the guess's own, so that two or three trials cannot make the fit
    look exact. `groups`, the group of each trial, are given where the rates are for a group not among them, such as
    another model: each group is then left out as a whole, and counts as one error, the median of its trials', because
    what its trials have in common is a single draw. A single group's error is that of the guess.

    `only_waiting` says which trials show nothing but how long the arithmetic waits for transfers and for the host; none
    if it is not given. They count in no error but that of waiting.
    """
    if not measured:
        return prior
    count = len(measured)
    flags, own_group = list(only_waiting) or [False] * count, list(groups) or [str(place) for place in range(count)]
    told = list(zip(measured, flags, own_group, strict=True))
    rates = {
        left_out: _fitted(prior, [(shown, flag) for shown, flag, group in told if group != left_out])
        for left_out in dict.fromkeys(own_group)
    }

    def held_out(missed: Callable[[StepWork, float, Rates], float], *, waiting: bool) -> list[float]:
        by_group: dict[str, list[float]] = {}
        for (work, taken), flag, group in told:
            if work.waits if waiting else not flag:
                by_group.setdefault(group, []).append(missed(work, taken, rates[group]))
        return [float(np.median(errors)) for errors in by_group.values()]

    error = _tempered(held_out(_missed, waiting=False), prior.relative_error)
    waited = held_out(partial(_missed_waiting, error), waiting=True)
    return replace(
        _fitted(prior, [(shown, flag) for shown, flag, _ in told]),
        calibrated_on=count,
        relative_error=error,
        waiting_error=_tempered(waited, max(WAITING_ERROR, prior.relative_error)) if waited else None,
    )


def _missed(work: StepWork, taken: float, rates: Rates) -> float:
    return abs(seconds(work, rates) / taken - 1.0)


def _missed_waiting(relative_error: float, work: StepWork, taken: float, rates: Rates) -> float:
    """Relative error of the seconds that it waits, between 0 and 1, if that of the others is `relative_error`: the one
    with which `Rates.error_of` says how far the whole is off."""
    share = rates.waiting_share(work)
    return min(1.0, max(0.0, (_missed(work, taken, rates) - (1.0 - share) * relative_error) / share))


def _tempered(errors: Sequence[float], guessed: float) -> float:
    """Their median, with one more: the largest, or what the guess is off by if that is more."""
    return float(np.median([*errors, max(guessed, *errors)]))


def _fitted(prior: Rates, measured: Sequence[tuple[tuple[StepWork, float], bool]]) -> Rates:
    """The rates and the factor of waiting, each in turn while the other stands; with each trial comes whether it
    shows waiting alone."""
    computing = [shown for shown, only_waiting in measured if not only_waiting]
    waiting = [(work, taken) for (work, taken), _ in measured if work.waits]
    found = _computing(prior, computing)
    if waiting:
        found = _computing(replace(prior, waiting=_waiting(found, waiting, prior.waiting)), computing)
        found = replace(found, waiting=_waiting(found, waiting, prior.waiting))
    return found


def _waiting(rates: Rates, measured: Sequence[tuple[StepWork, float]], prior: float) -> float:
    """Seconds of waiting over those that `rates.transfers` tells: least squares of relative errors, shrunk towards
    `prior` (ridge regression)."""
    shares = np.array([_waits(work, rates) / taken for work, taken in measured])
    left = np.array([1.0 - _without_waiting(work, rates) / taken for work, taken in measured])
    found = (shares @ left + WAITING_WEIGHT**2 * prior) / (shares @ shares + WAITING_WEIGHT**2)
    return max(float(found), LEAST_RATIO)


def _computing(prior: Rates, measured: Sequence[tuple[StepWork, float]]) -> Rates:
    """The rates: first one factor for all, the median over the trials, so that even one trial moves every rate;
    then least squares of relative errors, shrunk towards that: ridge regression (Hoerl and Kennard 1970) on each rate's
    ratio to the scaled guess."""
    if not measured:
        return prior
    taken = np.array([max(time - prior.waiting * _waits(work, prior), LEAST_RATIO * time) for work, time in measured])

    def relative(rates: Rates) -> Features:
        shares: Features = np.array([_parts(work, rates) for work, _ in measured]) / taken[:, None]
        return shares

    scale = np.exp(-np.median(np.log(relative(prior).sum(axis=1))))
    scaled = found = prior.times(np.full(len(KINDS), scale))
    for _ in range(ROUNDS):
        shown = relative(found) * (scaled.as_array() / found.as_array())
        left = np.vstack([shown, PRIOR_WEIGHT * np.eye(len(KINDS))])
        right = np.concatenate([np.ones(len(shown)), np.full(len(KINDS), PRIOR_WEIGHT)])
        found = scaled.times(np.maximum(np.linalg.lstsq(left, right, rcond=None)[0], LEAST_RATIO))
        if prior.processor:
            break
    return found
