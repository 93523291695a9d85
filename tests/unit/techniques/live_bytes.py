"""The exact number of tensor bytes that are live at a training step's peak, without a device."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

if TYPE_CHECKING:  # trainers' own environments, which have no autofit, count with this file too
    from autofit.training.step import TrainingStep


class LiveBytes(TorchDispatchMode):
    """Counts every storage from the operation that creates it until the last tensor using it is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def note(self, tensor: torch.Tensor) -> None:
        """Count the storage of `tensor` once."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def gone(_: object) -> None:
            del self._storages[key]
            self.live -= size

        self._storages[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_iter(made):
            if isinstance(value, torch.Tensor):
                self.note(value)
        return made


def peak_bytes(step: TrainingStep, tokens: torch.Tensor) -> int:
    """The peak of a whole optimizer step on `tokens`, including weights and the states from an earlier step."""
    with LiveBytes() as counter:
        for tensor in [*step.module.parameters(), *step.module.buffers()]:
            counter.note(tensor)
        step.run(tokens)
        counter.peak = 0
        step.run(tokens)
    return counter.peak
