"""A device's rates before any trial: from its data sheet, or from its number of cores. Calibration replaces them."""

from __future__ import annotations

from dataclasses import replace
from statistics import geometric_mean

from autofit.catalog.hardware import Card, card_of, cards
from autofit.core.device.hardware import Hardware, compute_capability
from autofit.core.device.work_kinds import FLOP, FRESH, KINDS, OPERATION, QUANTISE_8BIT, format_of, unit
from autofit.estimate.time.roofline import Rates
from autofit.estimate.time.transfers import seconds_per_byte

MATMUL_EFFICIENCY = 0.65
"""Share of a data sheet's dense peak that large matrix products reach; a guess that calibration replaces."""
BANDWIDTH_EFFICIENCY = 0.8
"""Share of a data sheet's bandwidth that elementwise kernels reach; a guess that calibration replaces."""
OPERATION_SECONDS = 1.5e-5
"""Host time that PyTorch takes to launch one operation of eager transformers with PEFT; a guess that calibration
replaces. From LoRA of Qwen-1.8B on an A100, which only waits for launches: 0.125 s a micro-step (README.md of
QwenLM/Qwen) for some 5,900 operations, each 1.4 times as long in checkpointed layers (`benchmarks/published.py`)."""
CORE_FLOPS, CORE_WIDE_FLOPS, CORE_BANDWIDTH, CORE_OPERATION_SECONDS = 180e9, 85e9, 6.4e9, 25e-6
"""Per core of any CPU: FLOP/s of matrix products in 16 bits and in fp32, bytes/s between its caches and memory; and
seconds per operation, thread synchronisation included. Calibrated on benchmarks/recorded/cpu-2c-every-axis.jsonl, of an
AMD EPYC with bf16 arithmetic; orders of magnitude for any other."""
HAVE_ARITHMETIC = {"bf16": ("bf16", "fp16", "amx"), "fp16": ("fp16", "amx", "asimd")}
"""Words in a CPU's `instructions` of which one says that it computes in a format, as oneDNN's levels include the lower.
ARM's do not say whether they have fp16: they are taken to."""
EMULATED_SHARE, WIDENED_SHARE = 0.04, 0.5
"""Share of the speed in fp32 that products in a 16-bit format reach on a CPU without arithmetic for it; and that
bf16 reaches where AVX-512 widens it. Geometric means of the probes in benchmarks/recorded/processors. Intel's own
instructions for bf16, without AMX, are no faster: 0.55 (Xeon, family 6, model 207)."""
TENSOR_CORES = 7.0
"""The compute capability from which NVIDIA's cards have them, but for the GTX 16 (CUDA C++ Programming Guide)."""
GUESS_ERROR = 1.0
"""Relative error of a time guessed from the number of cores alone, or from other cards of like compute capability,
which differ by up to a factor of 3."""
ATTENTION_FACTOR = 4.0
"""How many FLOPs of an fp32 matrix product take a CPU as long as one FLOP of PyTorch's fused attention in any format:
17 to 38 GFLOP/s against 90 on one core of an AMD EPYC (torch 2.13)."""
BLOCKWISE_FACTOR = 7.0
"""How many ordinary bytes take a CPU as long as one byte of bitsandbytes' quantisation, which looks every value up in a
table: 1.0 GB/s against 6.8 of a multiplication by a scalar on 2 cores of an AMD EPYC (bitsandbytes 0.50)."""
DEQUANTISED_FACTOR = 2.0
"""The factor of bitsandbytes' dequantisation, which looks up codes: between 1 and 4 the configs of every-axis show no
difference."""
NEAR_FACTOR = 0.5
"""The factor of an operation that finds most of what it reads in the CPU's caches."""
PAGES_BYTES_PER_SECOND = 2.5e9
"""Speed of getting new pages: 4 KiB in some 1.6 us on a Zen 5; a guess for others, which a probe replaces."""


def prior(hardware: Hardware) -> Rates | None:
    """Rates from an accelerator's data sheet, or from a CPU's number of cores.

    An NVIDIA device that is not in the catalog, or whose entry lacks a figure, gets those of the cards of the nearest
    compute capability; None for any other such accelerator.
    """
    card = card_of(hardware.name)
    rates: Rates | None
    if hardware.kind == "cpu":
        rates = _of_cores(hardware)
    elif card is None:
        rates = _of_like_cards(hardware, f"{hardware.name} is not in the catalog")
    elif (missing := missing_figure(card)) is not None:
        rates = _of_like_cards(hardware, f"the catalog lacks {missing} of {hardware.name}")
    else:
        rates = guess(
            flops=card.training_peak_flops or 0.0,
            wide_flops=card.peak_flops["fp32"],
            bandwidth=card.bandwidth_bytes_per_second,
            emulates_bf16=not card.bf16,
        )
    return None if rates is None else replace(rates, transfers=seconds_per_byte(hardware))


def missing_figure(card: Card) -> str | None:
    """The first figure of those that the time model needs which the catalog lacks, in words; None if it has all."""
    if card.training_peak_flops is None:
        return "the 16-bit peak (peak_flops: bf16 or fp16)"
    if "fp32" not in card.peak_flops:
        return "the fp32 peak (peak_flops: fp32)"
    return None


def tf32_speedup(hardware: Hardware) -> float:
    """How many times as fast as in fp32 the card multiplies in TF32, by its data sheet; 1 if the catalog has none."""
    card = card_of(hardware.name)
    peaks = {} if card is None else card.peak_flops
    return peaks["tf32"] / peaks["fp32"] if {"tf32", "fp32"} <= peaks.keys() else 1.0


def _of_like_cards(hardware: Hardware, why: str) -> Rates | None:
    """Rates from the mean figures of the NVIDIA cards whose compute capability is nearest to that of `hardware`."""
    if not hardware.is_nvidia:
        return None
    sheets = [card for card in cards() if card.vendor == "nvidia" and missing_figure(card) is None]
    capability = compute_capability(hardware.capability) or 0.0
    nearest = min(sheets, key=lambda card: abs(float(card.capability) - capability)).capability
    alike = [card for card in sheets if card.capability == nearest]
    share = hardware.share_of_card
    wide_flops = share * geometric_mean(card.peak_flops["fp32"] for card in alike)
    flops = share * geometric_mean(card.training_peak_flops or 0.0 for card in alike)
    rates = guess(
        flops=flops if capability >= TENSOR_CORES else wide_flops,
        wide_flops=wide_flops,
        bandwidth=share * geometric_mean(card.bandwidth_bytes_per_second for card in alike),
    )
    stand_in = f"cards of compute capability {nearest}, because {why}"
    return replace(rates, relative_error=GUESS_ERROR, stand_in=stand_in)


def guess(*, flops: float, wide_flops: float, bandwidth: float, emulates_bf16: bool = False) -> Rates:
    """Rates from a card's peaks: FLOP/s in 16 bits and in fp32, bytes per second. Emulated products in bf16 are made in
    fp32."""
    peaks = {"fp32": wide_flops, "fp16": flops, "bf16": wide_flops if emulates_bf16 else flops}

    def per(kind: str) -> float:
        if unit(kind) == OPERATION:
            return OPERATION_SECONDS
        if unit(kind) == FLOP:
            return 1.0 / (MATMUL_EFFICIENCY * peaks[format_of(kind) or "fp32"])
        return 1.0 / (BANDWIDTH_EFFICIENCY * bandwidth)

    return Rates(seconds_per=tuple(map(per, KINDS)))


def _product_flops(number_format: str | None, processor: Hardware) -> float:
    """FLOP/s of one core's products. Where the instruction sets are not known, it is taken to have what is needed."""
    instructions = processor.instructions
    if number_format not in ("bf16", "fp16"):
        return CORE_WIDE_FLOPS
    if instructions is None:
        return CORE_FLOPS
    widened = number_format == "bf16" and instructions.startswith("avx512")
    slow = widened and "Intel" in processor.device_name and "amx" not in instructions
    if not slow and any(word in instructions for word in HAVE_ARITHMETIC[number_format]):
        return CORE_FLOPS
    return CORE_WIDE_FLOPS * (WIDENED_SHARE if widened else EMULATED_SHARE)


def _of_cores(processor: Hardware) -> Rates:
    """Rates of a CPU of which only the number of cores and the instruction sets are known."""
    cores = max(processor.cores, 1)

    def per(kind: str) -> float:
        if unit(kind) == OPERATION:
            return CORE_OPERATION_SECONDS
        if kind == FRESH:
            return 1.0 / PAGES_BYTES_PER_SECOND
        if kind.startswith("attention"):
            return ATTENTION_FACTOR / (cores * CORE_WIDE_FLOPS)
        if unit(kind) == FLOP:
            return 1.0 / (cores * _product_flops(format_of(kind), processor))
        quantises, dequantises = kind == QUANTISE_8BIT, kind.startswith("dequantise")
        factor = BLOCKWISE_FACTOR if quantises else DEQUANTISED_FACTOR if dequantises else 1.0
        return (NEAR_FACTOR if kind.endswith("near") else factor) / (cores * CORE_BANDWIDTH)

    return Rates(seconds_per=tuple(map(per, KINDS)), processor=True, relative_error=GUESS_ERROR)
