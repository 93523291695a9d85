"""The speed of an optimizer's update, of transfers to the host, and of unpacking 4-bit weights and packing states."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from autofit.core.device.probe import UPDATE_ON_HOST, WAYS, transfer
from autofit.core.device.work_kinds import DEQUANTISE_8BIT, QUANTISE_8BIT, UPDATE_8BIT, four_bit, update
from autofit.core.units import MIB
from autofit.probe.bench import FORMATS, Bench
from autofit.probe.shapes import Shapes

ELEMENTS = 4 * MIB, 64 * MIB
"""The weights that are updated on a processor and on an accelerator: too many for the caches together with their
gradients and states, and for an accelerator's launches to matter."""
STATES = MIB, 64 * MIB
"""Elements that are packed into 8 bits on a processor and on an accelerator."""
MOST_SECONDS = 0.06


def measure(bench: Bench) -> Iterator[dict[str, float]]:
    """Seconds per byte of torch's fused AdamW, whose update reads and writes weights, gradients and two states."""
    elements = ELEMENTS[bench.accelerator]
    for name, dtype in FORMATS.items():
        weights = torch.nn.Parameter(bench.take(dtype, elements).clone())
        weights.grad = bench.take(dtype, elements)
        optimizer = torch.optim.AdamW([weights], lr=1e-6, fused=True)
        optimizer.step()
        seconds = bench.seconds(optimizer.step, most=MOST_SECONDS)
        yield {update(name): seconds / (4 * weights.nbytes)}


def measure_on_host() -> Iterator[dict[str, float]]:
    """Bytes per second of torch's fused AdamW on an accelerator's host, as a figure: DeepSpeed's kernel, which trials
    use, goes over the same bytes and has to be compiled first."""
    weights = torch.nn.Parameter(torch.zeros(16 * MIB))
    weights.grad = torch.zeros(16 * MIB)
    optimizer = torch.optim.AdamW([weights], lr=1e-6, fused=True)
    optimizer.step()
    seconds = Bench(torch.device("cpu")).seconds(optimizer.step, most=MOST_SECONDS)
    passes = 7  # weights and two states both ways, gradients once: as `estimate.sharding.library.passes` counts them
    yield {UPDATE_ON_HOST: passes * weights.nbytes / seconds}


def measure_transfers(bench: Bench) -> Iterator[dict[str, float]]:
    """Bytes per second each way between an accelerator and its host's pinned memory, as figures."""
    size = 128 * MIB
    on_device = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    for way, (into, source) in zip(WAYS, ((on_device, on_host), (on_host, on_device)), strict=True):
        copy = partial(into.copy_, source, non_blocking=True)
        yield {transfer(way): size / bench.seconds(copy, most=0.1)}


def measure_quantised(bench: Bench, shapes: Shapes) -> Iterator[dict[str, float]]:
    """Seconds per byte of bitsandbytes' kernels, as its layers and optimizers call them."""
    from bitsandbytes import functional

    for name, dtype in FORMATS.items():
        weights = bench.take(dtype, shapes.feed_forward, shapes.hidden)
        packed, state = functional.quantize_4bit(weights, quant_type="nf4", compress_statistics=False)
        seconds = bench.seconds(partial(functional.dequantize_4bit, packed, state), most=MOST_SECONDS)
        yield {four_bit(name): seconds / (packed.nbytes + state.absmax.nbytes + weights.nbytes)}
    values = bench.take(torch.float32, STATES[bench.accelerator])
    codes, state = functional.quantize_blockwise(values, blocksize=256)
    moved = values.nbytes + codes.nbytes + state.absmax.nbytes
    yield {
        QUANTISE_8BIT: bench.seconds(lambda: functional.quantize_blockwise(values, blocksize=256), most=MOST_SECONDS)
        / moved,
        DEQUANTISE_8BIT: bench.seconds(lambda: functional.dequantize_blockwise(codes, state), most=MOST_SECONDS)
        / moved,
    }
    if bench.accelerator:
        yield {UPDATE_8BIT: _update_8bit(bench)}


def _update_8bit(bench: Bench) -> float:
    """Seconds per byte of an update in one kernel, of weights in fp32."""
    from bitsandbytes.optim import AdamW8bit

    elements = ELEMENTS[bench.accelerator]
    weights = torch.nn.Parameter(bench.take(torch.float32, elements).clone())
    weights.grad = bench.take(torch.float32, elements)
    optimizer = AdamW8bit([weights], lr=1e-6)
    optimizer.step()
    seconds = bench.seconds(optimizer.step, most=MOST_SECONDS)
    return seconds / (2 * weights.nbytes + 2 * elements)
