"""Caches what an operation returns for operands without data: PyTorch would recompute it at five times the cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autofit.estimate.time.op_costs import Work, work
from autofit.estimate.tracing.fake_weights import empty

Key = tuple[Any, ...]
Shape = tuple[int, ...]
Recipe = Callable[[list[FakeTensor]], Any]
"""Makes a result like the one before, from an operation's tensors."""

_NAMESPACES = ("aten", "prims", "bitsandbytes")
"""Libraries whose results depend only on the formats of the operands and the other arguments."""
_OF_DATA = (torch.Tag.data_dependent_output, torch.Tag.inplace_view)
_MASKS = (torch.bool, torch.uint8, torch.int8)
"""Dtypes that `index` treats as masks: how many elements these select depends on data."""


class Operands:
    """The arguments of an operation: its tensors, and a key that is equal where results have the same format."""

    __slots__ = ("is_decisive", "key", "tensors")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[FakeTensor] = []
        self.is_decisive = True
        """Whether the key determines the result's format."""
        parts: list[Any] = [func]
        self._describe(args, parts)
        for name, value in kwargs.items():
            parts.append(name)
            self._describe((value,), parts)
        self.key: Key = tuple(parts)

    def _describe(self, values: Any, parts: list[Any]) -> None:
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None:
                    self.is_decisive = False
                self.tensors.append(value)
                parts.append(_format(value))
            elif kind is tuple or kind is list:
                parts.append(len(value))
                self._describe(value, parts)
            elif value is None:
                parts.append(None)
            elif isinstance(value, torch.Tensor):
                self.is_decisive = False
            else:
                parts.append((kind, value))  # the type distinguishes 1 from 1.0 and True


def _format(tensor: FakeTensor) -> Key:
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.requires_grad,
        tensor.is_neg(),
        tensor.fake_device,
    )


def remembered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> tuple[Any, Work]:
    """The result of an operation and its cost; `run`, which runs it on fake tensors, is called once per operand format.

    Called in a dispatch mode above the fake one, after autograd has done its part.
    """
    operands = Operands(func, args, kwargs)
    entry = _KNOWN.get(operands.key) if operands.is_decisive else None
    if entry is not None:
        recipe, cost = entry
        return recipe(operands.tensors), cost
    result = run()
    cost = work(func, args, result)
    if operands.is_decisive and _repeats(func, operands.tensors) and Operands(func, args, kwargs).key == operands.key:
        new_recipe = _recipe(result, operands.tensors)
        if new_recipe is not None:
            _KNOWN[operands.key] = new_recipe, cost
    return result, cost


_KNOWN: dict[Key, tuple[Recipe, Work]] = {}


def _repeats(func: Any, operands: list[FakeTensor]) -> bool:
    """Whether operands of this format always give results of the same format."""
    if func.namespace not in _NAMESPACES or any(tag in func.tags for tag in _OF_DATA):
        return False
    if not all(_is_plain(operand) for operand in operands):
        return False
    masked = any(operand.dtype in _MASKS for operand in operands)
    return torch.Tag.dynamic_output_shape not in func.tags or (func is _INDEX and not masked)


_INDEX = torch.ops.aten.index.Tensor


def _is_plain(tensor: FakeTensor) -> bool:
    return tensor.layout is torch.strided and not tensor.dtype.is_complex


def _recipe(result: Any, operands: list[FakeTensor]) -> Recipe | None:
    """How to make a result like `result`; None where that is not known."""
    if result is None:
        return lambda tensors: None
    if type(result) is FakeTensor:
        return _of_tensor(result, operands)
    kind = type(result)
    if kind not in (tuple, list):
        return None
    parts = [part for item in result if (part := _recipe(item, operands)) is not None]
    storages = [item.untyped_storage()._cdata for item in result if isinstance(item, torch.Tensor)]
    if len(parts) < len(result) or len(set(storages)) < len(storages):
        return None
    return lambda tensors: kind(part(tensors) for part in parts)


def _of_tensor(result: FakeTensor, operands: list[FakeTensor]) -> Recipe | None:
    """A recipe for one of the operands itself, a view of one, or a tensor with a storage of its own."""
    for index, operand in enumerate(operands):
        if result is operand:
            return lambda tensors: tensors[index]
    if not _is_plain(result) or result.is_neg() or result.constant is not None or result.requires_grad:
        return None
    device, dtype = result.fake_device, result.dtype
    shape, stride, offset = tuple(result.shape), result.stride(), int(result.storage_offset())
    for index, operand in enumerate(operands):
        if result.untyped_storage()._cdata == operand.untyped_storage()._cdata:
            return lambda tensors: _view(tensors[index], dtype, offset, shape, stride)

    def fresh(tensors: list[FakeTensor]) -> FakeTensor:
        return empty(_mode(), shape, stride, dtype, device)

    alike = fresh(operands).untyped_storage().nbytes() == result.untyped_storage().nbytes()
    return fresh if alike and offset == 0 else None


def _view(of: FakeTensor, dtype: torch.dtype, offset: int, shape: Shape, stride: Shape) -> FakeTensor:
    storage = of.untyped_storage()
    with torch._C._DisableTorchDispatch():
        view = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, shape, stride)
    return FakeTensor(of.fake_mode, view, of.fake_device)


def _mode() -> FakeTensorMode:
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    assert isinstance(mode, FakeTensorMode)
    return mode
