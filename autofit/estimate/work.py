"""What a step's operations cost: arithmetic, bytes moved, and how many operations there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from autofit.estimate.amounts import Amounts

_ATEN = torch.ops.aten


class Kind(IntFlag):
    """What an operation's speed depends on besides the amount of work."""

    PLAIN = 0
    WIDE = 1
    """Arithmetic in fp32."""
    ATTENTION = 2
    """PyTorch's fused attention."""
    BLOCKWISE = 4
    """bitsandbytes' blockwise quantisation, as of 8-bit optimizer states."""
    DEQUANTISED = 8
    """Values looked up by their codes: bitsandbytes' dequantisation of 4-bit weights and 8-bit states."""


class Work(NamedTuple):
    """The cost of one operation."""

    flops: int
    """Multiplications and additions of matrix products and attention; 0 for everything else."""
    moved: tuple[int, ...]
    """Bytes read and written, per operand."""
    kind: Kind


@dataclass(frozen=True, slots=True)
class Works:
    """The costs of many operations as arrays, as functions of micro-batch and rank."""

    flops: Amounts
    moved: Amounts
    """Bytes of every operand of every operation."""
    owners: NDArray[np.int64]
    """For every operand, the operation that moves it."""
    kinds: NDArray[np.int64]
    times: NDArray[np.float64]
    """How often each operation runs."""

    @classmethod
    def of(cls, works: Sequence[Work], times: float = 1) -> Works:
        """From a trace at the primes."""
        return cls(
            Amounts.of(w.flops for w in works),
            Amounts.of(size for w in works for size in w.moved),
            np.repeat(np.arange(len(works)), [len(w.moved) for w in works]),
            np.array([w.kind for w in works], dtype=np.int64),
            np.full(len(works), float(times)),
        )

    @classmethod
    def joined(cls, parts: Sequence[Works]) -> Works:
        """All parts, in order."""
        starts = np.cumsum([0, *(len(p.kinds) for p in parts)])
        return cls(
            Amounts.joined([p.flops for p in parts]),
            Amounts.joined([p.moved for p in parts]),
            np.concatenate([p.owners + start for p, start in zip(parts, starts[:-1], strict=True)]),
            np.concatenate([p.kinds for p in parts]),
            np.concatenate([p.times for p in parts]),
        )

    def at(self, micro_batch: int, rank: int) -> Costs:
        """The costs at this micro-batch and rank."""
        moved = np.zeros(len(self.kinds))
        np.add.at(moved, self.owners, self.moved.at(micro_batch, rank))
        return Costs(self.flops.at(micro_batch, rank), moved, self.kinds, self.times)


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of many operations as arrays."""

    flops: NDArray[np.float64]
    bytes: NDArray[np.float64]
    kinds: NDArray[np.int64]
    """The `Kind` of each."""
    times: NDArray[np.float64]
    """How often each operation runs."""

    def shared(self, ranks: int) -> Costs:
        """The same operations on an equal share of the data; none with 0 ranks."""
        if not ranks:
            return Costs(self.flops, self.bytes, self.kinds, 0.0 * self.times)
        return Costs(self.flops / ranks, self.bytes / ranks, self.kinds, self.times)

    def repeated(self, times: int) -> Costs:
        """The same operations, run this many times."""
        return Costs(self.flops, self.bytes, self.kinds, self.times * times)


def work(func: Any, args: tuple[Any, ...], result: Any) -> Work:
    """The cost of one operation on tensors."""
    name = str(func)
    table = _TABLES.get(name)
    tensors = [*_tensors(args), *_tensors((result,))]
    if table is not None:
        tensors = [t for t in tensors if t.shape != args[table].shape]
    moved = tuple(t.numel() * t.element_size() for t in tensors)
    kind = Kind.ATTENTION if name.startswith(_ATTENTION) else _KINDS.get(name, Kind.PLAIN)
    rule = _FLOPS.get(name)
    if rule is None:
        return Work(0, moved, kind)
    if name == _FOUR_BIT_PRODUCT:  # the weight is dequantised first, except by the kernels for a few tokens
        moved += (math.prod(args[2]) * args[0].element_size(),)
    return Work(rule(args), moved, kind | Kind.WIDE if args[0].dtype == torch.float32 else kind)


def _tensors(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [v for v in value if isinstance(v, torch.Tensor)]
    return found


def _product(a: torch.Tensor, b: torch.Tensor) -> int:
    """2 m n k of [..., m, k] @ [..., k, n]."""
    return 2 * a.numel() * b.shape[-1]


def _attention(query: torch.Tensor, key: torch.Tensor) -> int:
    """Scores and their product with the values, halved for the causal mask; tensors [batch, heads, tokens, width]."""
    batch, heads, tokens, width = query.shape
    return 2 * batch * heads * tokens * key.shape[2] * width


def _four_bit(args: tuple[Any, ...]) -> int:
    activations, _, shape, *_ = args
    rows: int = activations.numel() // activations.shape[-1]
    weights: int = math.prod(shape)
    return 2 * rows * weights


_ATTENTION = "aten._scaled_dot_product"
_FOUR_BIT_PRODUCT = "bitsandbytes.gemm_4bit.default"
_KINDS = {
    "bitsandbytes.quantize_blockwise.default": Kind.BLOCKWISE,
    "bitsandbytes.dequantize_blockwise.default": Kind.DEQUANTISED,
    "bitsandbytes.dequantize_4bit.default": Kind.DEQUANTISED,
    _FOUR_BIT_PRODUCT: Kind.DEQUANTISED,
}
_TABLES = {
    "aten.embedding.default": 0,
    "aten.gather.default": 0,
    "aten.scatter_add_.default": 0,
    "aten.nll_loss_forward.default": 0,
}
"""Operations that touch only a few entries of one operand, with that operand's place among the arguments."""
_FLOPS: dict[str, Callable[[tuple[Any, ...]], int]] = {
    "aten.mm.default": lambda args: _product(args[0], args[1]),
    "aten.bmm.default": lambda args: _product(args[0], args[1]),
    "aten.addmm.default": lambda args: _product(args[1], args[2]),
    "aten.addmm_.default": lambda args: _product(args[1], args[2]),
    "aten.baddbmm.default": lambda args: _product(args[1], args[2]),
    "aten._grouped_mm.default": lambda args: _product(args[0], args[1]),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": lambda args: _attention(args[0], args[1]),
    # Five products against two: the scores are recomputed (Dao 2023, section 3.2).
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": lambda args: (
        5 * _attention(args[1], args[2]) // 2
    ),
    _FOUR_BIT_PRODUCT: _four_bit,
}
