"""What CUDA kernels hold beyond their results while they run: none of it shows in a trace on a fake CPU.

The trace sees the operations of the CPU; each function here names the kernel that runs in its place on an NVIDIA GPU,
and the source that allocates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FP32_BYTES = 4
SEQUENCE_TILE = 128
"""Rows to which flash attention rounds sequences (seqlen_q_rounded in aten/src/ATen/native/transformers/cuda/
flash_attn/flash_api.cpp)."""
CUSTOM_GEMM_ROWS = 4
"""Up to here bitsandbytes multiplies without dequantising the weight (_GEMM_4BIT_CUSTOM_FLOOR_M in
bitsandbytes/backends/cuda/ops.py)."""
NF4_BLOCK = 64


def cuda_scratch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes that the CUDA kernel of an operation allocates and frees within it."""
    rule = _RULES.get(str(func))
    return 0 if rule is None else rule(args)


def _flash_backward(args: tuple[Any, ...]) -> int:
    """mha_bwd of flash_api.cpp: fp32 sums of the query's gradient, and with grouped queries the keys' and values'
    gradients for every query head. Arguments: (grad_out, query, key, ...), tensors [batch, heads, tokens, width]."""
    query: torch.Tensor = args[1]
    key: torch.Tensor = args[2]
    batch, heads, tokens, width = query.shape
    rows = _up(tokens, SEQUENCE_TILE)
    columns = _up(width, 32 if width <= 128 else 64)
    accumulated = batch * heads * rows * (columns + 1) * FP32_BYTES
    if key.shape[1] == heads:
        return accumulated
    return accumulated + 2 * batch * heads * key.shape[2] * width * query.element_size()


def _four_bit_product(args: tuple[Any, ...]) -> int:
    """The dequantised weight, which cuBLAS multiplies with, and its fp32 scales. Arguments: (activations, packed
    weight, shape, scales, ...)."""
    activations: torch.Tensor = args[0]
    shape: Sequence[int] = args[2]
    rows = activations.numel() // activations.shape[-1]
    if rows <= CUSTOM_GEMM_ROWS:
        return 0
    weights = math.prod(shape)
    return weights * activations.element_size() + -(-weights // NF4_BLOCK) * FP32_BYTES


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


_RULES: dict[str, Callable[[tuple[Any, ...]], int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _flash_backward,
    "bitsandbytes.gemm_4bit.default": _four_bit_product,
}

CUBLAS_WORKSPACE_BYTES = {"default": 8 * 1024**2 + 128 * 1024, "9": 32 * 1024**2, "10": 32 * 1024**2}
"""Per cuBLAS handle, inside the caching allocator, by major compute capability (getChosenWorkspaceSize in
aten/src/ATen/cuda/CublasHandlePool.cpp): ":4096:2:16:8" is 8,519,680 bytes; Hopper and Blackwell take 32 MiB."""


def cublas_workspace_bytes(capability: str | None) -> int:
    """What one cuBLAS handle holds. The forward's thread and autograd's have one each."""
    major = (capability or "").partition(".")[0]
    return CUBLAS_WORKSPACE_BYTES.get(major, CUBLAS_WORKSPACE_BYTES["default"])
