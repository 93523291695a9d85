"""Has torch dispatch operations on a fake CPU tensor as it does on a CUDA tensor, where that changes what is allocated.

CUDA's autocast runs many operations in fp32 that a CPU's leaves in 16 bits. The rules are registered in the dispatcher
itself, so that they also apply to operations that others consist of.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ATEN = torch.ops.aten
WIDENED = (
    _ATEN.layer_norm.default,
    _ATEN.group_norm.default,
    _ATEN.rms_norm.default,  # listed from torch 2.12 on
    _ATEN.pow.Tensor_Scalar,
    _ATEN.pow.Tensor_Tensor,
    _ATEN.pow.Scalar,
    _ATEN.rsqrt.default,
    _ATEN.reciprocal.default,
    _ATEN.exp.default,
    _ATEN.expm1.default,
    _ATEN.log.default,
    _ATEN.log1p.default,
    _ATEN.log2.default,
    _ATEN.log10.default,
    _ATEN.softplus.default,
    _ATEN.logsumexp.default,
    _ATEN.cosine_similarity.default,
)
"""Operations of language models that CUDA's autocast runs on operands widened to fp32, and a CPU's as they are
(AT_FORALL_FP32 of aten/src/ATen/autocast_mode.h; AutocastCPU in autocast_mode.cpp)."""
SUMMED_WIDE = (
    _ATEN.softmax.int,
    _ATEN.log_softmax.int,
    _ATEN.sum.default,
    _ATEN.sum.dim_IntList,
    _ATEN.cumsum.default,
    _ATEN.cumprod.default,
    _ATEN.linalg_vector_norm.default,
)
"""Operations whose result CUDA's autocast makes fp32 unless the caller asks for a format
(AT_FORALL_FP32_SET_OPT_DTYPE of the same file)."""
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
AS_GIVEN = (_ATEN.cat.default, _ATEN.stack.default, _ATEN.index_copy.default)
"""Operations whose operands a CPU's autocast first widens to the widest among them, and CUDA's does not (they are
not in AT_FORALL_PROMOTE of the same file)."""


@contextmanager
def cuda_dispatch() -> Iterator[None]:
    """Inside, autocast on CPU tensors has CUDA's list of fp32 operations; dropout and softmax are CUDA's kernels."""
    try:
        # Registered anew each time, within less than a millisecond: nothing else in the process is to see these rules.
        with torch.library._scoped_library("aten", "IMPL") as registry:
            for operations, rule in ((WIDENED, _widened), (SUMMED_WIDE, _summed_wide)):
                for operation in operations:
                    if operation.has_kernel_for_dispatch_key(torch._C.DispatchKey.AutocastCUDA):
                        registry.impl(operation, rule(operation), "AutocastCPU")
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # that these take the place of others
                for operation in AS_GIVEN:
                    registry.impl(operation, _as_given(operation), "AutocastCPU")
            registry.impl(_ATEN.dropout.default, _dropout, "AutogradCPU")
            registry.impl(_ATEN.softmax.int, _softmax, "AutogradCPU")
            _forget_dispatch()
            yield
    finally:
        _forget_dispatch()


def _forget_dispatch() -> None:
    """Have torch.compile look up anew which rule is an operation's."""
    for operation in (*WIDENED, *SUMMED_WIDE, *AS_GIVEN, _ATEN.dropout.default, _ATEN.softmax.int):
        operation._dispatch_cache.clear()


def _as_given(operation: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operation(*args, **kwargs)

    return run


def _widened(operation: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operation(*(arg.float() if _castable(arg) else arg for arg in args), **kwargs)

    return run


def _summed_wide(operation: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operation._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("dtype") is None and _castable(args[0]):
            given["dtype"] = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operation(**given)

    return run


def _castable(value: Any) -> bool:
    """Whether autocast converts an argument (is_eligible of autocast_mode.h)."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _dropout(given: torch.Tensor, share: float, training: bool) -> torch.Tensor:
    """CUDA's kernel keeps a mask of one byte per element, where the CPU's keeps factors in the input's format
    (is_fused_kernel_acceptable of aten/src/ATen/native/Dropout.cpp)."""
    return torch.native_dropout(given, share, True)[0] if training and share > 0.0 else given


def _softmax(given: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """CUDA's kernel reads fp16 and writes fp32, where a CPU's needs a widened copy (softmax of aten/src/ATen/native/
    SoftMax.cpp)."""
    if given.dtype is torch.float16 and dtype is torch.float32:
        return torch._softmax(given, dim, True)
    return torch._softmax(given if dtype is None else given.to(dtype), dim, False)
