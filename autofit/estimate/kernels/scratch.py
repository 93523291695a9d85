"""Memory that PyTorch's kernels allocate within one operation, invisible to a trace of fake tensors: on every device,
and on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from autofit.techniques import quantisation

if TYPE_CHECKING:
    import torch

FP32_BYTES = 4
FOUR_BIT_PRODUCT = "bitsandbytes.gemm_4bit.default"


class Held(NamedTuple):
    """Bytes of each block that a kernel holds while it runs, in the order in which it takes them."""

    before: tuple[int, ...] = ()
    """Blocks that it takes before its result; they are freed after all others, the last of them at the end and the rest
    latest first."""
    passing: int = 0
    """One that it takes after that and frees before the others."""
    beside: tuple[int, ...] = ()
    """Blocks that it takes then; they are freed first, the latest of them before the others."""
    sums: tuple[int, int, int] | None = None
    """The values that it adds up, in how many columns, and into how many rows, one for each entry of a vocabulary; 0
    for a single row. What that takes (`column_sums`) is no multiple of the micro-batch."""


Scratch = Callable[[str, tuple[Any, ...]], Held]
"""(an operation's name, its arguments) -> what its kernel holds while it runs."""


def common_scratch(name: str, args: tuple[Any, ...]) -> Held:
    """What an operation of this name holds while it runs, on a CPU as on an accelerator.

    `logsumexp` holds the exponentials of its whole operand before it sums them (`logsumexp_out_impl` of
    aten/src/ATen/native/ReduceOps.cpp). Products, norms, softmax, look-ups and updates take at most 2.5 MiB on a CPU.
    """
    if name != "aten.logsumexp.default":
        return Held()
    operand: torch.Tensor = args[0]
    return Held(beside=(operand.nbytes,))


def host_scratch(name: str, args: tuple[Any, ...]) -> Held:
    """What an operation of this name holds on a CPU.

    bitsandbytes has no 4-bit product of its own for CPUs: the weight is dequantised whole, its scales first
    (`_gemm_4bit_default_impl` of backends/default/ops.py).
    """
    return Held(before=dequantised(args)) if name == FOUR_BIT_PRODUCT else common_scratch(name, args)


def dequantised(args: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes of the fp32 scales of a 4-bit product's weight, and of the weight in the format of the activations.
    Arguments: (activations, packed weight, shape, ...)."""
    activations: torch.Tensor = args[0]
    weights = math.prod(args[2])
    return -(-weights // quantisation.BLOCK) * FP32_BYTES, weights * activations.element_size()
