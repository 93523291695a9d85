"""What a step's operations cost: arithmetic, bytes moved, and how many operations there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from autofit.core.device.work_kinds import (
    DEQUANTISE_8BIT,
    FORMATS,
    LAYOUTS,
    MEMORY_BOUND,
    PASSES,
    PLACES,
    QUANTISE_8BIT,
    UPDATE_8BIT,
    WIDE,
    attended,
    attention,
    batched,
    called,
    four_bit,
    memory_bound,
    operands,
    product,
    update,
    wide_product,
)
from autofit.estimate.memory.symbolic_sizes import MICRO_BATCH, RANK, SymbolicSizes


class Family(NamedTuple):
    """The kinds of work that one operation is counted in."""

    flops: str | None
    """The kind of its arithmetic; None for an operation that only moves bytes."""
    bytes: tuple[str, str]
    """The kinds of its bytes: found in the caches, and not."""
    call: str | None = None
    """The kind of its call, beside its launch; None where that takes no time worth counting."""


def _moves(operation: str, number_format: str) -> tuple[str, str]:
    near, far = PLACES
    return memory_bound(operation, number_format, near), memory_bound(operation, number_format, far)


def _linear(number_format: str, layout: str, *, wide: bool = False) -> Family:
    flops = wide_product(number_format, layout) if wide else product(number_format, layout)
    return Family(flops, (operands(number_format, layout),) * 2, called(number_format))


def _of_four_bit_product(number_format: str) -> Family:
    return Family(product(number_format, "nt"), (four_bit(number_format),) * 2, called(number_format))


def _fused_attention(number_format: str, direction: str) -> Family:
    return Family(attention(number_format, direction), (attended(number_format, direction),) * 2)


def _families() -> tuple[Family, ...]:
    products = [_linear(f, layout, wide=wide) for f in FORMATS for layout in LAYOUTS for wide in (False, True)]
    products += [_of_four_bit_product(f) for f in FORMATS]
    products += [Family(batched(f), _moves("elementwise", f)) for f in FORMATS]
    fused = [_fused_attention(f, direction) for f in FORMATS for direction in PASSES]
    moving = [Family(None, _moves(operation, f)) for operation in MEMORY_BOUND for f in FORMATS]
    alone = [kind for f in FORMATS for kind in (four_bit(f), update(f))]
    alone += [DEQUANTISE_8BIT, QUANTISE_8BIT, UPDATE_8BIT]
    return (*products, *fused, *moving, *(Family(None, (kind,) * 2) for kind in alone))


FAMILIES = _families()
_NUMBER = {family: number for number, family in enumerate(FAMILIES)}
_OF_FP32 = {batched("fp32"), *(kind("fp32", layout) for kind in (product, wide_product) for layout in LAYOUTS)}
_FP32_PRODUCTS = np.array([family.flops in _OF_FP32 for family in FAMILIES])


class Work(NamedTuple):
    """The cost of one operation."""

    flops: int
    """Multiplications and additions of matrix products and attention; 0 for everything else."""
    moved: tuple[int, ...]
    """Bytes read and written, per operand."""
    family: int
    """Its place in `FAMILIES`."""
    made: int = 0
    """Bytes of its largest result; 0 where it writes into an operand."""


@dataclass(frozen=True, slots=True)
class Works:
    """The costs of many operations as arrays, as functions of micro-batch and rank."""

    flops: SymbolicSizes
    moved: SymbolicSizes
    """Bytes of every operand of every operation."""
    made: SymbolicSizes
    """Bytes of the largest result of every operation."""
    owners: NDArray[np.int64]
    """For every operand, the operation that moves it."""
    families: NDArray[np.int64]
    times: NDArray[np.float64]
    """How often each operation runs."""

    @classmethod
    def of(cls, works: Sequence[Work], times: float = 1) -> Works:
        """From a trace at the primes."""
        return cls(
            SymbolicSizes.of(w.flops for w in works),
            SymbolicSizes.of(size for w in works for size in w.moved),
            SymbolicSizes.of(w.made for w in works),
            np.repeat(np.arange(len(works)), [len(w.moved) for w in works]),
            np.array([w.family for w in works], dtype=np.int64),
            np.full(len(works), float(times)),
        )

    @classmethod
    def joined(cls, parts: Sequence[Works]) -> Works:
        starts = np.cumsum([0, *(len(p.families) for p in parts)])
        return cls(
            SymbolicSizes.joined([p.flops for p in parts]),
            SymbolicSizes.joined([p.moved for p in parts]),
            SymbolicSizes.joined([p.made for p in parts]),
            np.concatenate([p.owners + start for p, start in zip(parts, starts[:-1], strict=True)]),
            np.concatenate([p.families for p in parts]),
            np.concatenate([p.times for p in parts]),
        )

    def at(self, micro_batch: int, rank: int) -> Costs:
        moved = np.zeros(len(self.families))
        np.add.at(moved, self.owners, self.moved.at(micro_batch, rank))
        flops, made = self.flops.at(micro_batch, rank), self.made.at(micro_batch, rank)
        return Costs(flops, moved, made, self.families, self.times)


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of many operations as arrays."""

    flops: NDArray[np.float64]
    bytes: NDArray[np.float64]
    made: NDArray[np.float64]
    """Bytes of the largest result of each."""
    families: NDArray[np.int64]
    """The place in `FAMILIES` of each."""
    times: NDArray[np.float64]
    """How often each operation runs."""

    def shared(self, ranks: int) -> Costs:
        """The same operations on an equal share of the data; none with 0 ranks."""
        if not ranks:
            return replace(self, times=0.0 * self.times)
        return replace(self, flops=self.flops / ranks, bytes=self.bytes / ranks, made=self.made / ranks)

    def faster_products(self, times: float) -> Costs:
        """The same operations, with products of fp32 matrices so many times as fast."""
        return replace(self, flops=np.where(_FP32_PRODUCTS[self.families], self.flops / times, self.flops))

    def repeated(self, times: int) -> Costs:
        """The same operations, run this many times."""
        return replace(self, times=self.times * times)


def work(func: Any, args: tuple[Any, ...], result: Any) -> Work:
    """The cost of one operation on tensors."""
    name = str(func)
    table = _TABLES.get(name)
    tensors = [*_tensors(args), *_tensors((result,))]
    number_format = _format(tensors)
    if table is not None:
        tensors = [t for t in tensors if t.shape != args[table].shape]
    moved = tuple(t.numel() * t.element_size() for t in tensors)
    made = max((t.nbytes for t in _tensors((result,)) if all(t is not a for a in _tensors(args))), default=0)
    rule = (
        (_attention_backward if "backward" in name else _attention) if name.startswith(_ATTENTION) else _FLOPS.get(name)
    )
    if rule is None:
        return Work(0, moved, _NUMBER[_moving(name, tensors, number_format)], made)
    if name == _FOUR_BIT_PRODUCT:  # the weight is dequantised first, except by the kernels for a few tokens
        unpacked = math.prod(args[2]) * args[0].element_size()
        return Work(rule(args), (*moved, unpacked), _NUMBER[_of_four_bit_product(number_format)], made)
    return Work(rule(args), moved, _NUMBER[_computing(name, args, number_format)], made)


def fused(read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> Work:
    """The cost of one generated kernel, by the tensors that it reads and those that it writes."""
    results = list(written)
    every = [*read, *results]
    family = Family(None, _moves("elementwise", _format(every)))
    return Work(0, tuple(t.nbytes for t in every), _NUMBER[family], max((t.nbytes for t in results), default=0))


def _computing(name: str, args: tuple[Any, ...], number_format: str) -> Family:
    if name.startswith(_ATTENTION):
        return _fused_attention(number_format, PASSES["backward" in name])
    if name in _BATCHED:
        return Family(batched(number_format), _moves("elementwise", number_format))
    left, right = args[-2:] if name.startswith("aten.mm") else args[1:3]
    layout = ("n" if _by_rows(left) else "t") + ("n" if _by_rows(right) else "t")
    layout = layout if layout in LAYOUTS else "tn"
    # Tokens are as many as the micro-batch has: a matrix's own width is never a multiple of the primes.
    widths = [d for d in (*left.shape, right.shape[-1]) if d % MICRO_BATCH and d % RANK]
    return _linear(number_format, layout, wide=max(widths, default=0) >= WIDE)


def _by_rows(factor: torch.Tensor) -> bool:
    """Whether a matrix lies row by row in memory."""
    return factor.stride(-1) == 1 or factor.shape[-1] == 1


def _moving(name: str, tensors: Sequence[torch.Tensor], number_format: str) -> Family:
    if name.startswith("bitsandbytes"):
        kind = _OF_BITSANDBYTES.get(name.split(".")[1], UPDATE_8BIT)
        return Family(None, (four_bit(number_format) if kind is None else kind,) * 2)
    if name.startswith("aten._fused"):
        return Family(None, (update(number_format),) * 2)
    operation = _CLASSES.get(name.split(".")[1], "elementwise")
    if operation == "elementwise" and len({t.dtype for t in tensors if t.is_floating_point()}) > 1:
        operation = "cast"
    return Family(None, _moves(operation, number_format))


def _format(tensors: Sequence[torch.Tensor]) -> str:
    """The narrowest format of these, which is the one that may have to be emulated."""
    formats = {t.dtype for t in tensors}
    return "bf16" if torch.bfloat16 in formats else "fp16" if torch.float16 in formats else "fp32"


def _tensors(values: Any) -> list[torch.Tensor]:
    tensors = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            tensors += [v for v in value if isinstance(v, torch.Tensor)]
    return tensors


def _product(a: torch.Tensor, b: torch.Tensor) -> int:
    """2 m n k of [..., m, k] @ [..., k, n]."""
    return 2 * a.numel() * b.shape[-1]


def _attention(args: tuple[Any, ...]) -> int:
    """Scores and their product with the values, halved for the causal mask. Arguments: (query, key, ...), tensors
    [batch, heads, tokens, width]."""
    query: torch.Tensor = args[0]
    key: torch.Tensor = args[1]
    batch, heads, tokens, width = query.shape
    return 2 * batch * heads * tokens * key.shape[2] * width


def _attention_backward(args: tuple[Any, ...]) -> int:
    """Five products against two: the scores are recomputed (Dao 2023, section 3.2). Arguments: (grad_out, query, key,
    ...)."""
    return 5 * _attention(args[1:]) // 2


def _four_bit(args: tuple[Any, ...]) -> int:
    activations, _, shape, *_ = args
    rows: int = activations.numel() // activations.shape[-1]
    weights: int = math.prod(shape)
    return 2 * rows * weights


_ATTENTION = "aten._scaled_dot_product"
_BATCHED = ("aten.bmm.default", "aten.baddbmm.default", "aten._grouped_mm.default")
_FOUR_BIT_PRODUCT = "bitsandbytes.gemm_4bit.default"
_OF_BITSANDBYTES = {
    "quantize_blockwise": QUANTISE_8BIT,
    "dequantize_blockwise": DEQUANTISE_8BIT,
    "quantize_4bit": QUANTISE_8BIT,
    "dequantize_4bit": None,
}
"""The kind of each; None for the one that depends on the format. Others are updates."""
_CLASSES = {
    **dict.fromkeys(("silu", "silu_backward", "gelu", "gelu_backward", "exp", "sigmoid", "sigmoid_backward", "tanh",
                     "tanh_backward", "log", "cos", "sin", "softplus"), "transcendental"),
    **dict.fromkeys(("sum", "mean", "amax", "max", "linalg_vector_norm", "_foreach_norm", "var_mean"), "reduction"),
    **dict.fromkeys(("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "logsumexp",
                     "native_layer_norm", "native_layer_norm_backward"), "softmax"),
}  # fmt: skip
"""The class of an operation, where it is not `elementwise`. Layer norm passes over each row as softmax does."""
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
    _FOUR_BIT_PRODUCT: _four_bit,
}
