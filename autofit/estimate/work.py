"""What the operations of a step cost: arithmetic, bytes moved, and how many there are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_ATEN = torch.ops.aten


class Work(NamedTuple):
    """The cost of one operation."""

    flops: float
    """Multiplications and additions of matrix products and attention; 0 for everything else."""
    bytes: int
    """Read and written, each operand once."""
    wide: bool
    """Whether the arithmetic is in fp32."""


def work(func: Any, args: tuple[Any, ...], result: Any) -> Work:
    """The cost of one operation on tensors."""
    tensors = [*_tensors(args), *_tensors((result,))]
    moved = sum(t.numel() * t.element_size() for t in tensors)
    rule = _FLOPS.get(str(func))
    if rule is None:
        return Work(0.0, moved, False)
    return Work(rule(args), moved, args[0].dtype == torch.float32)


def _tensors(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [v for v in value if isinstance(v, torch.Tensor)]
    return found


def _product(a: torch.Tensor, b: torch.Tensor) -> float:
    """2 m n k of [..., m, k] @ [..., k, n]."""
    return 2.0 * a.numel() * b.shape[-1]


def _attention(query: torch.Tensor, key: torch.Tensor) -> float:
    """Scores and their product with the values, halved for the causal mask; tensors [batch, heads, tokens, width]."""
    batch, heads, tokens, width = query.shape
    return float(2 * batch * heads * tokens * key.shape[2] * width)


def _four_bit(args: tuple[Any, ...]) -> float:
    activations, _, shape, *_ = args
    return float(2 * activations.numel() // activations.shape[-1] * math.prod(shape))


_FLOPS: dict[str, Callable[[tuple[Any, ...]], float]] = {
    "aten.mm.default": lambda args: _product(args[0], args[1]),
    "aten.bmm.default": lambda args: _product(args[0], args[1]),
    "aten.addmm.default": lambda args: _product(args[1], args[2]),
    "aten.addmm_.default": lambda args: _product(args[1], args[2]),
    "aten.baddbmm.default": lambda args: _product(args[1], args[2]),
    "aten._grouped_mm.default": lambda args: _product(args[0], args[1]),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": lambda args: _attention(args[0], args[1]),
    # Five products against two: the scores are computed again (Dao 2023, section 3.2).
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": lambda args: (
        2.5 * _attention(args[1], args[2])
    ),
    "bitsandbytes.gemm_4bit.default": _four_bit,
}
