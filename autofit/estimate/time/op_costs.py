"""What a step's operations cost: arithmetic, bytes moved, and how many operations there are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from autofit.core.device.work_kinds import (
    DEQUANTISE_8BIT,
    INDEX,
    KINDS,
    LAUNCH,
    LAYOUTS,
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
from autofit.estimate.kernels.scratch import FOUR_BIT_PRODUCT
from autofit.estimate.memory.symbolic_sizes import MICRO_BATCH, RANK, SymbolicSizes, joined


class Kinds(NamedTuple):
    """The kinds of work that one operation is counted in."""

    flops: str
    """The kind of its arithmetic; LAUNCH for an operation that only moves bytes."""
    near: str
    """The kind of its bytes that are found in the caches, and of those that are not."""
    far: str
    call: str = LAUNCH
    """The kind of its call, beside its launch; LAUNCH where that takes no time worth counting."""


def _moves(operation: str, number_format: str, *, flops: str = LAUNCH) -> Kinds:
    near, far = (memory_bound(operation, number_format, place) for place in PLACES)
    return Kinds(flops, near, far)


@cache
def _indices(kinds: Kinds) -> tuple[int, ...]:
    return tuple(INDEX[kind] for kind in kinds)


_FP32_PRODUCTS = np.isin(
    KINDS, [batched("fp32"), *(kind("fp32", layout) for kind in (product, wide_product) for layout in LAYOUTS)]
)


class Work(NamedTuple):
    """The cost of one operation."""

    flops: int
    """Multiplications and additions of matrix products and attention; 0 for everything else."""
    moved: tuple[int, ...]
    """Bytes read and written, per operand."""
    kinds: Kinds
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
    kinds: NDArray[np.int64]
    """The indices of `Kinds`, [operations, 4]."""
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
            np.array([_indices(w.kinds) for w in works], dtype=np.int64).reshape(-1, 4),
            np.full(len(works), float(times)),
        )

    @classmethod
    def joined(cls, parts: Sequence[Works]) -> Works:
        starts = np.cumsum([0, *(len(p.kinds) for p in parts)])
        return joined([replace(p, owners=p.owners + start) for p, start in zip(parts, starts[:-1], strict=True)])

    def at(self, micro_batch: int, rank: int) -> Costs:
        moved = np.zeros(len(self.kinds))
        np.add.at(moved, self.owners, self.moved.at(micro_batch, rank))
        flops, made = self.flops.at(micro_batch, rank), self.made.at(micro_batch, rank)
        return Costs(flops, moved, made, self.kinds, self.times)


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of many operations as arrays."""

    flops: NDArray[np.float64]
    bytes: NDArray[np.float64]
    made: NDArray[np.float64]
    """Bytes of the largest result of each."""
    kinds: NDArray[np.int64]
    """The indices of `Kinds`, [operations, 4]."""
    times: NDArray[np.float64]
    """How often each operation runs."""

    def shared(self, ranks: int) -> Costs:
        """The same operations on an equal share of the data; none with 0 ranks."""
        if not ranks:
            return replace(self, times=0.0 * self.times)
        return replace(self, flops=self.flops / ranks, bytes=self.bytes / ranks, made=self.made / ranks)

    def faster_products(self, times: float) -> Costs:
        """The same operations, with products of fp32 matrices so many times as fast."""
        return replace(self, flops=np.where(_FP32_PRODUCTS[self.kinds[:, 0]], self.flops / times, self.flops))

    def repeated(self, times: int) -> Costs:
        """The same operations, run this many times."""
        return replace(self, times=self.times * times)


def work(func: Any, args: tuple[Any, ...], result: Any) -> Work:
    """The cost of one operation on tensors."""
    name = str(func)
    given, results = _tensors(args), _tensors((result,))
    tensors = [*given, *results]
    number_format = _format(tensors)
    if name in _LOOK_UPS:
        tensors = [t for t in tensors if t.shape != args[0].shape]
    moved = tuple(t.numel() * t.element_size() for t in tensors)
    made = max((t.nbytes for t in results if all(t is not a for a in given)), default=0)
    flops = 0
    if name.startswith(_ATTENTION):
        flops, kinds = _attention(args, number_format, backward="backward" in name)
    elif name == FOUR_BIT_PRODUCT:
        activations, _, shape, *_ = args
        rows, weights = activations.numel() // activations.shape[-1], math.prod(shape)
        flops = 2 * rows * weights
        unpacked = four_bit(number_format)
        kinds = Kinds(product(number_format, "nt"), unpacked, unpacked, called(number_format))
        # The weight is dequantised first, except by the kernels for a few tokens.
        moved = (*moved, weights * activations.element_size())
    elif name in _FACTORS:
        left, right = args[_FACTORS[name] :][:2]
        flops = 2 * left.numel() * right.shape[-1]
        is_batched = name in _BATCHED
        kinds = (
            _moves("elementwise", number_format, flops=batched(number_format))
            if is_batched
            else _of_product(left, right, number_format)
        )
    else:
        kinds = _moving(name, tensors, number_format)
    return Work(flops, moved, kinds, made)


def fused(read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> Work:
    """The cost of one generated kernel, by the tensors that it reads and those that it writes."""
    results = list(written)
    every = [*read, *results]
    kinds = _moves("elementwise", _format(every))
    return Work(0, tuple(t.nbytes for t in every), kinds, max((t.nbytes for t in results), default=0))


def _attention(args: tuple[Any, ...], number_format: str, *, backward: bool) -> tuple[int, Kinds]:
    """Scores and their product with the values, halved for the causal mask; five products against these two in the
    backward, which recomputes the scores (Dao 2023, section 3.2). Arguments: (query, key, ...), after the gradient in
    the backward, tensors [batch, heads, tokens, width]."""
    query, key = args[backward:][:2]
    batch, heads, tokens, width = query.shape
    flops = 2 * batch * heads * tokens * key.shape[2] * width
    direction = PASSES[backward]
    bytes_ = attended(number_format, direction)
    return 5 * flops // 2 if backward else flops, Kinds(attention(number_format, direction), bytes_, bytes_)


def _of_product(left: torch.Tensor, right: torch.Tensor, number_format: str) -> Kinds:
    """The kinds of a product of two matrices."""
    layout = ("n" if _by_rows(left) else "t") + ("n" if _by_rows(right) else "t")
    layout = layout if layout in LAYOUTS else "tn"
    # Tokens are as many as the micro-batch has: a matrix's own width is never a multiple of the primes.
    widths = [d for d in (*left.shape, right.shape[-1]) if d % MICRO_BATCH and d % RANK]
    flops = (wide_product if max(widths, default=0) >= WIDE else product)(number_format, layout)
    bytes_ = operands(number_format, layout)
    return Kinds(flops, bytes_, bytes_, called(number_format))


def _by_rows(factor: torch.Tensor) -> bool:
    """Whether a matrix lies row by row in memory."""
    return factor.stride(-1) == 1 or factor.shape[-1] == 1


def _moving(name: str, tensors: Sequence[torch.Tensor], number_format: str) -> Kinds:
    """The kinds of an operation without products."""
    short = name.split(".")[1]
    if name.startswith("bitsandbytes"):
        kind = four_bit(number_format) if short == "dequantize_4bit" else _OF_BITSANDBYTES.get(short, UPDATE_8BIT)
        return Kinds(LAUNCH, kind, kind)
    if short.startswith("_fused"):
        kind = update(number_format)
        return Kinds(LAUNCH, kind, kind)
    operation = _CLASSES.get(short, "elementwise")
    if operation == "elementwise" and len({t.dtype for t in tensors if t.is_floating_point()}) > 1:
        operation = "cast"
    return _moves(operation, number_format)


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


_ATTENTION = "aten._scaled_dot_product"
_BATCHED = ("aten.bmm.default", "aten.baddbmm.default", "aten._grouped_mm.default")
_OF_BITSANDBYTES = {
    "quantize_blockwise": QUANTISE_8BIT,
    "dequantize_blockwise": DEQUANTISE_8BIT,
    "quantize_4bit": QUANTISE_8BIT,
}
"""Others are updates, but for the one that depends on the format."""
_CLASSES = {
    **dict.fromkeys(("silu", "silu_backward", "gelu", "gelu_backward", "exp", "sigmoid", "sigmoid_backward", "tanh",
                     "tanh_backward", "log", "cos", "sin", "softplus"), "transcendental"),
    **dict.fromkeys(("sum", "mean", "amax", "max", "linalg_vector_norm", "_foreach_norm", "var_mean"), "reduction"),
    **dict.fromkeys(("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "logsumexp",
                     "native_layer_norm", "native_layer_norm_backward"), "softmax"),
}  # fmt: skip
"""The class of an operation, where it is not `elementwise`. Layer norm passes over each row as softmax does."""
_LOOK_UPS = (
    "aten.embedding.default",
    "aten.gather.default",
    "aten.scatter_add_.default",
    "aten.nll_loss_forward.default",
)
"""Operations that touch only a few entries of their first operand."""
_FACTORS = {
    "aten.mm.default": 0,
    "aten.bmm.default": 0,
    "aten.addmm.default": 1,
    "aten.addmm_.default": 1,
    "aten.baddbmm.default": 1,
    "aten._grouped_mm.default": 0,
}
"""Products [..., m, k] @ [..., k, n], with the place of the first factor among the arguments."""
