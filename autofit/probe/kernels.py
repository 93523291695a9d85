"""The speed of each attention kernel that torch can choose from on an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autofit.probe.bench import FORMATS, Bench
from autofit.probe.shapes import Shapes

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "unfused": SDPBackend.MATH,
}


def measure(bench: Bench, shapes: Shapes, tokens: int = 2048) -> Iterator[dict[str, float]]:
    """FLOP/s of forward and backward together of each kernel that runs in each format, as figures."""
    size = (1, shapes.heads, tokens, shapes.head_width)
    # As `memory_bound.measure_attention` counts them: two causal products forward, five backward.
    flops = 7.0 * shapes.heads * tokens * tokens * shapes.head_width
    for number_format, dtype in FORMATS.items():
        operands = [bench.take(dtype, *size).requires_grad_() for _ in range(3)]
        gradient = bench.take(dtype, *size)
        for name, kernel in KERNELS.items():
            try:
                taken = bench.seconds(partial(_attend, kernel, operands, gradient), most=0.02)
            except RuntimeError:
                continue  # not for this format or device
            yield {f"{name} attention in {number_format}, FLOP per second": flops / taken}


def _attend(kernel: SDPBackend, operands: list[torch.Tensor], gradient: torch.Tensor) -> None:
    with sdpa_kernel(kernel):
        query, key, value = operands
        result = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(result, operands, gradient)
