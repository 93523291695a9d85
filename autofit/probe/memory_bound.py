"""The speed of operations that take as long as their bytes do: elementwise, casts, sums, softmax, and attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from autofit.core.device.work_kinds import FRESH, PASSES, PLACES, attended, attention, memory_bound
from autofit.core.units import MIB
from autofit.probe.bench import FORMATS, Bench
from autofit.probe.products import Sample, fitted, roofline
from autofit.probe.shapes import Shapes

MOVED = {"near": MIB, "far": 24 * MIB}, {"near": 24 * MIB, "far": 192 * MIB}
"""Bytes that an operation reads and writes on a processor and on an accelerator: those of a small micro-batch's
activations, and of a large one's."""
AMONG = {"near": 16 * MIB, "far": None}, {"near": 32 * MIB, "far": None}
"""Of how many bytes its operands are the ones that were read the longest ago, on a processor and on an accelerator:
what a layer's activations take, which the last level of cache holds; and more than any cache holds."""
MOST_SECONDS = 0.03
"""The most that one measurement takes."""
ATTENDED = (1, 64, 512), (4, 256, 2048)
"""Sequences whose attention is measured, their tokens at least, and at most, on a processor and on an accelerator: so
few that the bytes take longer than the arithmetic, and so many that they do not."""

Calls = list[tuple[Callable[[], Any], float]]
"""Calls, each with how many times it passes over an operand."""


def measure(bench: Bench, shapes: Shapes, number_format: str) -> Iterator[dict[str, float]]:
    """Seconds per byte of each class of operations."""
    dtype = FORMATS[number_format]
    all_moved = MOVED[bench.accelerator]
    among = AMONG[bench.accelerator]
    for place in PLACES:

        def take(width: int, place: str = place) -> torch.Tensor:
            """Another operand [rows, width]."""
            rows = max(all_moved[place] // (3 * dtype.itemsize * width), 1)
            return bench.take(dtype, rows, width, among=among[place])

        for operation, calls in _calls(take, shapes, dtype).items():
            size = take(_width(operation, shapes)).nbytes
            moved = sum(passes * size for _, passes in calls)
            seconds = sum(bench.seconds(call, most=MOST_SECONDS) for call, _ in calls)
            yield {memory_bound(operation, number_format, place): seconds / moved}


def measure_pages(bench: Bench) -> Iterator[dict[str, float]]:
    """Seconds per byte of a result for which a processor's system hands out new pages."""
    size = 64 * MIB
    buffer = torch.zeros(size, dtype=torch.uint8)
    reused = bench.seconds(lambda: buffer.fill_(1), most=MOST_SECONDS)
    fresh = bench.seconds(lambda: torch.empty(size, dtype=torch.uint8).fill_(1), most=MOST_SECONDS)
    yield {FRESH: max(fresh - reused, reused) / size}


def _width(operation: str, shapes: Shapes) -> int:
    if operation == "softmax":
        return shapes.vocabulary
    return shapes.feed_forward if operation == "transcendental" else shapes.hidden


def _calls(take: Callable[[int], torch.Tensor], shapes: Shapes, dtype: torch.dtype) -> dict[str, Calls]:
    """What is measured of each class of operations, on operands that `take` makes."""
    hidden, inner, vocabulary = shapes.hidden, shapes.feed_forward, shapes.vocabulary
    silu_backward = torch.ops.aten.silu_backward.default
    softmax_backward = torch.ops.aten._log_softmax_backward_data.default
    # Of fp32 the mean over both 16-bit formats would be the same, so that bf16 serves.
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    return {
        "elementwise": [(lambda: take(hidden) * take(hidden), 3), (lambda: take(hidden) + take(hidden), 3)],
        "cast": [(lambda: take(hidden).to(other), 1.0 + other.itemsize / dtype.itemsize)],
        "transcendental": [
            (lambda: functional.silu(take(inner)), 2),
            (lambda: silu_backward(take(inner), take(inner)), 3),
        ],
        "reduction": [
            (lambda: take(hidden).mean(-1, keepdim=True), 1),
            (lambda: torch._foreach_norm([take(hidden)]), 1),
        ],
        "softmax": [
            (lambda: functional.log_softmax(take(vocabulary), -1), 2),
            (lambda: softmax_backward(take(vocabulary), take(vocabulary), -1, dtype), 3),
        ],
    }


def measure_attention(bench: Bench, shapes: Shapes, number_format: str) -> Iterator[dict[str, float]]:
    """Seconds per FLOP and per byte of torch's scaled-dot-product attention, with the kernel that it chooses."""
    dtype = FORMATS[number_format]
    samples: dict[str, list[Sample]] = {direction: [] for direction in PASSES}
    sequences, tokens, most_tokens = ATTENDED[bench.accelerator]
    while tokens <= most_tokens:
        size = (sequences, shapes.heads, tokens, shapes.head_width)
        # 2 m n k for the scores and as much for their product with the values, halved for the causal mask.
        flops = 2.0 * sequences * shapes.heads * tokens * tokens * shapes.head_width
        query, key, value = (bench.take(dtype, *size).requires_grad_() for _ in range(3))
        forward = partial(functional.scaled_dot_product_attention, query, key, value, is_causal=True)
        seconds = bench.seconds(forward, most=MOST_SECONDS)
        samples["forward"].append((flops, 4.0 * query.nbytes, seconds))
        gradient = bench.take(dtype, *size)
        backward = partial(torch.autograd.grad, forward(), (query, key, value), gradient, retain_graph=True)
        seconds = bench.seconds(backward, most=MOST_SECONDS)
        # The backward pass makes five products where the forward pass makes two.
        samples["backward"].append((2.5 * flops, 8.0 * query.nbytes, seconds))
        tokens *= 2 if bench.accelerator or seconds > MOST_SECONDS / 4 else 8
        if seconds > MOST_SECONDS:
            break
    for direction, points in samples.items():
        per_flop, per_byte = (roofline if bench.accelerator else fitted)(points)
        yield {attention(number_format, direction): per_flop, attended(number_format, direction): per_byte}
