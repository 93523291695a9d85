"""What CUDA kernels hold beyond their results while they run, which a fake CPU does not show.

The trace sees the CPU's operations; each function here names the kernel that runs in their place on an NVIDIA GPU, and
the source file that allocates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autofit.core.device.hardware import compute_capability
from autofit.core.units import round_up
from autofit.estimate.kernels.column_sums import BLOCK_COLUMNS
from autofit.estimate.kernels.scratch import FOUR_BIT_PRODUCT, FP32_BYTES, Held, common_scratch, dequantised

if TYPE_CHECKING:
    import torch

SEQUENCE_TILE = 128
"""Flash attention rounds sequences up to a multiple of this many rows (seqlen_q_rounded in aten/src/ATen/native/
transformers/cuda/flash_attn/flash_api.cpp)."""
EFFICIENT_TILE = 64
"""Rows and columns of the tiles in which efficient attention sums the query's gradient (kBlockSizeI of most kernels in
aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernels/cutlassB.h)."""
NARROW_HEADS = 128
"""Up to this width efficient attention keeps what it adds up in registers (kKeepOutputInRF of kernel_forward.h in
mem_eff_attention, and kOutputInRF of kernel_backward.h, for the kernels of A100 and H100)."""
SPLIT_KEYS = 200
"""Parts into which it splits the keys of all heads together to sum wider ones' gradients (attention_backward.cu)."""
CUSTOM_GEMM_ROWS = 4
"""Up to this many rows bitsandbytes multiplies without dequantising the weight (_GEMM_4BIT_CUSTOM_FLOOR_M in
bitsandbytes/backends/cuda/ops.py)."""


def cuda_scratch(name: str, args: tuple[Any, ...], *, sequences: int = 0) -> Held:
    """What the CUDA kernel of an operation of this name holds while it runs; `sequences` is how many flash attention
    finds in a row where it keeps several apart."""
    if sequences and name == _FLASH_BACKWARD:
        return _flash_backward(args, sequences)
    rule = _RULES.get(name)
    return common_scratch(name, args) if rule is None else rule(args)


def _flash_backward(args: tuple[Any, ...], sequences: int = 0) -> Held:
    """mha_bwd of flash_api.cpp, and of the flash-attn package: fp32 sums of each row and accumulators of the query's
    gradient, and with grouped queries the keys' and values' gradients for every query head. Each of several `sequences`
    in a row (mha_varlen_bwd) has a tile's rows besides. Arguments: (grad_out, query, key, ...), tensors [batch, heads,
    tokens, width]."""
    query: torch.Tensor = args[1]
    key: torch.Tensor = args[2]
    batch, heads, tokens, width = query.shape
    rows = tokens + sequences * SEQUENCE_TILE if sequences else round_up(tokens, SEQUENCE_TILE)
    columns = round_up(width, 32 if width <= 128 else 64)
    accumulated = batch * heads * rows * FP32_BYTES, batch * heads * rows * columns * FP32_BYTES
    if key.shape[1] == heads:
        return Held(beside=accumulated)
    return Held(beside=accumulated + (batch * heads * key.shape[2] * width * query.element_size(),) * 2)


def _adds_in_memory(query: torch.Tensor) -> bool:
    """Whether efficient attention adds up in fp32 beside its results: in 16 bits, for wide heads."""
    return query.element_size() < FP32_BYTES and query.shape[-1] > NARROW_HEADS


def _efficient_forward(args: tuple[Any, ...]) -> Held:
    """output_accum of _efficient_attention_forward in attention.cu. Arguments: (query, key, value, ...), tensors
    [batch, heads, tokens, width]."""
    query: torch.Tensor = args[0]
    return Held(beside=(query.numel() * FP32_BYTES,)) if _adds_in_memory(query) else Held()


def _efficient_backward(args: tuple[Any, ...]) -> Held:
    """_efficient_attention_backward of attention_backward.cu: one fp32 per row, in fp32 summed from a product
    (kKernelComputesDelta), and an fp32 workspace: tiles of the query's gradient, each with four words, and beside what
    is kept in 16 bits a tile of the key's and one of the value's for every part of the keys (workspace_elements_gq, _gk
    and _gv in mem_eff_attention/kernel_backward.h). Arguments: (grad_out, query, key, ...), tensors [batch, heads,
    tokens, width]."""
    query: torch.Tensor = args[1]
    batch, heads, tokens, width = query.shape
    rows, columns = batch * heads, -(-width // EFFICIENT_TILE)
    tiles = -(-tokens // EFFICIENT_TILE) * columns
    staged = (2 * SPLIT_KEYS * columns * EFFICIENT_TILE**2 * FP32_BYTES,) if _adds_in_memory(query) else ()
    return Held(
        passing=query.nbytes if query.element_size() == FP32_BYTES else 0,
        beside=(rows * tokens * FP32_BYTES, rows * tiles * (EFFICIENT_TILE**2 + 4) * FP32_BYTES, *staged),
    )


def _four_bit_product(args: tuple[Any, ...]) -> Held:
    """The weight's fp32 scales, unpacked and then shifted, and the dequantised weight (_dequant_linear_fallback of
    bitsandbytes/backends/cuda/ops.py, whose locals go in the order in which it names them). Arguments: (activations,
    packed weight, shape, scales, ...)."""
    activations: torch.Tensor = args[0]
    if activations.numel() // activations.shape[-1] <= CUSTOM_GEMM_ROWS:
        return Held()
    scales, weight = dequantised(args)
    return Held(before=(scales, scales, weight))


def _softmax_backward(args: tuple[Any, ...]) -> Held:
    """The product of gradient and result (softmax_backward_cuda_out of aten/src/ATen/native/cuda/SoftMax.cu), of which
    there is none for log_softmax. Arguments: (gradient, result, ...)."""
    return Held(beside=(args[1].nbytes,))


def _safe_softmax(args: tuple[Any, ...]) -> Held:
    """Where the result is masked, for each score and then for each row (_safe_softmax of aten/src/ATen/native/
    transformers/attention.cpp). Arguments: (scores, ...)."""
    scores: torch.Tensor = args[0]
    return Held(beside=(scores.numel(), scores.numel() // scores.shape[-1]))


def _column_sums(args: tuple[Any, ...]) -> Held:
    """Sums and means over the leading dimensions (`column_sums.taken`). Arguments: (operand, dimensions, ...)."""
    operand: torch.Tensor = args[0]
    summed = sorted(dimension % operand.ndim for dimension in args[1] or ())
    columns = math.prod(operand.shape[len(summed) :])
    is_of_columns = 0 < len(summed) < operand.ndim and summed == list(range(len(summed)))
    if not is_of_columns or columns % 4 or columns < BLOCK_COLUMNS or not _in_rows(operand, len(summed)):
        return Held()
    return Held(sums=(operand.numel(), columns, 0))


def _embedding_gradient(args: tuple[Any, ...]) -> Held:
    """The tokens, sorted, and where each was; where a token's rows and each sum of some begin; and the sums
    (`column_sums.taken_by_entry`). Arguments: (gradient, tokens, vocabulary, ...)."""
    gradient, tokens, vocabulary = args[:3]
    return Held(
        before=(tokens.nbytes,) * 2,
        beside=(tokens.nbytes,) * 4,
        sums=(gradient.numel(), gradient.shape[-1], vocabulary),
    )


def _in_rows(operand: torch.Tensor, leading: int) -> bool:
    """Whether the trailing dimensions are rows without gaps between them, in any order of the `leading` ones, such as
    a gradient of heads that were transposed."""
    order = sorted(range(leading), key=operand.stride, reverse=True)
    stride = 1
    for dimension in reversed([*order, *range(leading, operand.ndim)]):
        if operand.shape[dimension] > 1 and operand.stride(dimension) != stride:
            return False
        stride *= operand.shape[dimension]
    return True


_FLASH_BACKWARD = "aten._scaled_dot_product_flash_attention_backward.default"
_RULES: dict[str, Callable[[tuple[Any, ...]], Held]] = {
    _FLASH_BACKWARD: _flash_backward,
    "aten._scaled_dot_product_efficient_attention.default": _efficient_forward,
    "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
    "aten._safe_softmax.default": _safe_softmax,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten.embedding_dense_backward.default": _embedding_gradient,
    "aten.sum.dim_IntList": _column_sums,
    "aten.mean.dim": _column_sums,
    FOUR_BIT_PRODUCT: _four_bit_product,
}

CUBLAS_WORKSPACE_BYTES = 8 * 1024**2 + 128 * 1024
"""Per cuBLAS handle, inside the caching allocator: ":4096:2:16:8" (getChosenWorkspaceSize in aten/src/ATen/cuda/
CublasHandlePool.cpp)."""
LARGE_CUBLAS_WORKSPACE_BYTES = 32 * 1024**2
"""The workspace on Hopper and, from torch 2.12 on, on Blackwell (10.0 and 12.0)."""


def cublas_workspace_bytes(capability: str | None, release: tuple[int, int]) -> int:
    """Workspace of one cuBLAS handle with torch's `release`; the forward's thread and autograd's have one each."""
    version = compute_capability(capability) or 0.0
    is_large = version >= 9.0 and (version < 10.0 or release >= (2, 12))
    return LARGE_CUBLAS_WORKSPACE_BYTES if is_large else CUBLAS_WORKSPACE_BYTES
