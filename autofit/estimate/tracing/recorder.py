"""Records what the operations of a training step allocate and free, on fake tensors that hold no data."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily

from autofit.core.errors import UsageError
from autofit.estimate.kernels.scratch import FOUR_BIT_PRODUCT, Scratch
from autofit.estimate.memory.memory_trace import BEFORE, Category, Event, MemoryTrace, Place, Storage
from autofit.estimate.time.op_costs import Work
from autofit.estimate.tracing.results import remembered


def without_data() -> FakeTensorMode:
    """The mode in which a step is traced: an operation that needs data fails instead of running on real tensors."""
    return FakeTensorMode(allow_fallback_kernels=False)


class NotTraced(UsageError):
    """A step whose code cannot be followed without data; the message says where."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode, entered after the fake mode, that sees every operation and every storage that it creates: from
    then until Python and autograd have let go of it, as in the allocator."""

    def __init__(self, scratch: Scratch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = MemoryTrace()
        self.place = Place("build", BEFORE)
        self._indices: dict[int, int] = {}
        self._scratch = scratch
        self._events: list[Event] = []
        self._ignored: set[int] = set()
        self._next: Place | None = None
        self._closed = False
        self._is_outside = False
        self._sum: tuple[int, int] | None = None
        """The storages of a gradient and of its sum with another, if the last operation has made that."""
        self._clearing = ExitStack()

    def __enter__(self) -> Self:
        clearing = partial(self._clear_in_order, torch.clear_autocast_cache)
        self._clearing.enter_context(patch.object(torch, "clear_autocast_cache", clearing))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        with self._clearing:
            super().__exit__(*raised)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: no compiled code runs under this mode, so Dynamo need not be kept out of each of its calls.
        `RecorderOfCompiled` is for such code."""
        return False

    def move(self, stage: str, layer: int) -> None:
        """Attribute the next operations to another place."""
        place = Place(stage, layer)
        if place != self.place:
            self.place = place
            self._events = []
            self.trace.segments.append((place, self._events))

    def move_with_next_operation(self, stage: str, layer: int) -> None:
        """Move to another place at the next operation; what Python frees until then still belongs here."""
        self._next = Place(stage, layer)

    def close(self) -> None:
        """Treat what is freed from now on as outliving the trace."""
        self._closed = True

    def resident(self, tensor: torch.Tensor, layer: int | None) -> None:
        """Register a tensor that exists before the step, and the decoder layer that it belongs to."""
        storage = self.trace.storages[self._add(tensor.untyped_storage(), None)]
        storage.layer = layer
        if isinstance(tensor, torch.nn.Parameter):
            storage.trained, storage.item_bytes = tensor.requires_grad, tensor.element_size()
            storage.stacked = tensor.dim() == 3 and tensor.shape[1] > 1  # a convolution's has one channel there

    def ignore(self, tensor: torch.Tensor) -> None:
        """Record nothing of this tensor's storage."""
        self._ignore(tensor.untyped_storage())

    def mark_hook(self) -> None:
        """Mark where autograd is done with a gradient and runs its hooks."""
        index = self._take(0)
        self.trace.storages[index].of_hook = True
        self._free(index)

    def holds(self, tensor: torch.Tensor, category: Category) -> None:
        """Say what the storage of `tensor` holds."""
        self.trace.storages[self._indices[tensor.untyped_storage()._cdata]].holds = category

    @contextmanager
    def outside_allocator(self) -> Iterator[None]:
        """Count what is allocated inside as memory outside the device's allocator."""
        self._is_outside = True
        yield
        self._is_outside = False

    def count(self, cost: Work) -> None:
        """Count the cost of one operation, or of what is not run as one."""
        self._follow()
        self.trace.work.setdefault(self.place, []).append(cost)

    def make(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of this format in a storage of its own."""
        self._follow()
        with _pop_mode_temporarily():
            tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        self._record(tensor)
        return tensor

    def _follow(self) -> None:
        if self._next is not None:
            following, self._next = self._next, None
            self.move(*following)

    def label(self, tensor: torch.Tensor, label: str) -> None:
        """Name the storage of `tensor` in the current stage."""
        self.trace.labels[self.place.stage, label] = self._indices[tensor.untyped_storage()._cdata]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].fake_device
        if func is _ITEM:
            return _plain_value(args[0])
        self._follow()
        kwargs = kwargs or {}
        self._sum = None
        result, cost = remembered(func, args, kwargs, lambda: self._run(func, args, kwargs))
        if func.is_view:
            return result
        if func is not _RESHAPE:
            self.count(cost)
        if func is _FLASH and self.place.stage == "forward-1":
            self.trace.flash_layers += not any(args[3:4])
        name = str(func)
        scratch = self._scratch(name, args)
        held = [self._take(size) for size in scratch.before]
        if isinstance(result, torch.Tensor):
            self._record(result)
            if name in _PRODUCTS and result.untyped_storage()._cdata in self._indices:
                self.trace.storages[self._indices[result.untyped_storage()._cdata]].of_product = True
            if func is _ADD and self._called_by(_ENGINE) and not torch.is_grad_enabled():
                self._note_sum(args[0], result)
        elif isinstance(result, (tuple, list)):
            for item in result:
                if isinstance(item, torch.Tensor):
                    self._record(item)
        if scratch.passing:
            self._free(self._take(scratch.passing))
        temporaries = [self._take(size) for size in scratch.beside]
        if scratch.sums is not None:
            values, columns, rows = scratch.sums
            temporaries.append(self._take(values))
            sums = self.trace.storages[temporaries[-1]]
            sums.summed_columns, sums.summed_rows = columns, rows
        for index in (*reversed(temporaries), *reversed(held[:-1]), *held[-1:]):
            self._free(index)
        return result

    def _called_by(self, function: str) -> bool:
        """Whether a function of this name has called the operation under way."""
        return sys._getframe(2).f_code.co_name == function

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation on fake tensors. Raises `NotTraced` for one that has no implementation for them."""
        if func is _GROUPED:
            return _grouped_product(args, kwargs)
        if func is _FUSED_SGD:
            return None  # updates in place, but has no shape rule to say so
        try:
            return func(*args, **kwargs)
        except UnsupportedOperatorException as error:
            raise NotTraced(f"{func} has no implementation without data") from error

    def _take(self, size: int) -> int:
        index = self._new(size, self.place)
        self._events.append(Event(index, True))
        return index

    def _record(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if self._is_outside:
            self.trace.outside_allocator.setdefault(self.place, []).append(storage.nbytes())
            self._ignore(storage)
        if storage._cdata not in self._indices and storage._cdata not in self._ignored:
            index = self._add(storage, self.place)
            self._events.append(Event(index, True))

    def _ignore(self, storage: torch.UntypedStorage) -> None:
        self._ignored.add(storage._cdata)
        weakref.finalize(storage, self._ignored.discard, storage._cdata)  # the next at this address is a different one

    def _add(self, storage: torch.UntypedStorage, place: Place | None) -> int:
        key = storage._cdata
        if key in self._indices:
            return self._indices[key]
        index = self._new(storage.nbytes(), place)
        self._indices[key] = index
        weakref.finalize(storage, self._forget, key)
        return index

    def _new(self, size: int, place: Place | None) -> int:
        recomputed = place is not None and place.phase == "backward" and torch.is_grad_enabled()
        self.trace.storages.append(Storage(size, place, recomputed=recomputed))
        return len(self.trace.storages) - 1

    def _note_sum(self, before: torch.Tensor, result: torch.Tensor) -> None:
        """The engine has summed two gradients (InputBuffer::accumulate of torch/csrc/autograd). With data it adds in
        place if nothing else holds the first, which is then gone before another operation runs."""
        keys = before.untyped_storage()._cdata, result.untyped_storage()._cdata
        is_plain = torch.ops.aten.is_non_overlapping_and_dense(before) and not before._is_view()
        if is_plain and all(key in self._indices for key in keys):
            self._sum = keys

    def _forget(self, key: int) -> None:
        index = self._indices.pop(key)
        if self._sum is not None and key == self._sum[0] and self._sum[1] in self._indices:
            total = self._indices[self._sum[1]]
            self._events.remove(Event(total, True))
            self._indices[self._sum[1]] = index
            self._sum = None
        elif not self._closed:
            self._free(index)

    def _clear_in_order(self, clear: Callable[[], None]) -> None:
        """Empty autocast's cache, and record what that frees in the order of allocation. Torch's own order is that of a
        hash table of addresses (cached_casts of aten/src/ATen/autocast_mode.cpp), another in every run."""
        self._sum, begin = None, len(self._events)  # no event is taken back meanwhile
        clear()
        self._events[begin:] = sorted(self._events[begin:])

    def _free(self, index: int) -> None:
        self.trace.storages[index].freed = self.place
        self._events.append(Event(index, False))


class RecorderOfCompiled(Recorder):  # type: ignore[no-untyped-call]
    """A recorder that torch.compile takes no notice of: it sees what compiled code runs, and not how that is made."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The base class's, which torch wraps here alone to keep Dynamo out of it."""
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _called_by(self, function: str) -> bool:
        """As in the base class, past the frames in which torch keeps Dynamo out of each call."""
        frame = sys._getframe(3)
        while frame.f_back is not None and _is_dynamos(frame.f_code.co_filename):
            frame = frame.f_back
        return frame.f_code.co_name == function


def _is_dynamos(file: str) -> bool:
    return file.endswith("_compile.py") or "_dynamo" in file


_ADD = torch.ops.aten.add.Tensor
_PRODUCTS = {"aten.mm.default", "aten.mm.out", "aten.addmm.default", "aten.bmm.default", FOUR_BIT_PRODUCT}
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
"""Its fourth argument is the share of scores that is dropped."""
_ENGINE = "_engine_run_backward"
"""The function of torch.autograd.graph within which autograd's engine runs."""
_DEVICE = torch.ops.prim.device.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_RESHAPE = torch.ops.aten._unsafe_view.default
"""A view in all but autograd's treatment of it: nothing is computed or moved."""
_FUSED_SGD = torch.ops.aten._fused_sgd_.default
_GROUPED = torch.ops.aten._grouped_mm.default


def _grouped_product(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The experts' product in the dtype of its operands: the shape rule knows only bf16, kernels know others, too."""
    a, b, *rest = args
    narrow = [torch.empty_like(operand, dtype=torch.bfloat16) for operand in (a, b)]
    result: torch.Tensor = _GROUPED(*narrow, *rest, **kwargs)
    return torch.empty_like(result, dtype=a.dtype)


def _plain_value(tensor: torch.Tensor) -> bool | int | float:
    """What reading a fake scalar gives: that of a batch of whole sequences and an optimizer that has made one step."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else 0
