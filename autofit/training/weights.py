"""Random weights on the device, in their final format, for a model built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Protocol
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
from torch import nn

from autofit.core.errors import UsageError
from autofit.techniques import adapters, quantisation
from autofit.training.decoder import decoder_layers

Created = WeakValueDictionary[int, nn.Parameter]
"""Parameters by the id of their meta-device counterpart; those that have been sharded by now are gone."""


class Sharder(Protocol):
    """Keeps only a rank's share of the weights as they are created, so that no rank ever holds the whole model."""

    def shard(self, module: nn.Module) -> None:
        """Called once all parameters of `module` have their values, on the device."""

    def whole(self, modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """A context in which the parameters that `modules` hold directly are whole; writes to them last."""


def materialise(model: nn.Module, *, device: torch.device, sharder: Sharder | None = None) -> None:
    """Give every parameter and buffer of `model` storage on `device` and the initial values of its architecture.

    Each tensor is created on `device` in its meta-device dtype: nothing passes through host memory or fp32, and 4-bit
    layers are quantised one at a time. With a `sharder`, a decoder layer is sharded as soon as it has its values, and
    everything outside the layers when the engine is made. The values are drawn in the same order either way.
    """
    from transformers import PreTrainedModel

    causal_lm = adapters.unwrap(model)
    causal_lm.tie_weights()
    layers = set(decoder_layers(model)) if sharder is not None else set()
    created: Created = WeakValueDictionary()
    blank: list[torch.Tensor] = []
    pool = torch.cuda.MemPool() if device.type == "cuda" and any(map(_is_four_bit, model.modules())) else None

    def initialise(original: Callable[[nn.Module], None], module: Any) -> None:
        if _is_four_bit(module):
            if module.bias is not None:
                module.bias = nn.Parameter(torch.zeros_like(module.bias, device=device), requires_grad=False)
            # transformers' default initializer_range
            quantisation.materialise(module, device=device, dtype=module.compute_dtype, std=0.02, pool=pool)
        else:
            _allocate(module, device, created, blank)
            original(module)
        if sharder is not None and module in layers:
            sharder.shard(module)

    with ExitStack() as stack:
        for part in causal_lm.modules():
            if isinstance(part, PreTrainedModel):  # which calls this for each module, after its submodules
                in_its_place = partial(initialise, part._init_weights)
                stack.enter_context(patch.object(part, "_init_weights", in_its_place))
        causal_lm.initialize_weights()
    for module in model.modules():
        _allocate(module, device, created, blank)
    never_written = {id(buffer) for buffer in blank if buffer._version == 0}
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and id(buffer) in never_written:  # wrong values would train another model
            raise UsageError(f"{type(causal_lm).__name__} has a constant that transformers does not restore: {name}")
    if causal_lm is not model:
        adapters.initialise(model, (lambda modules: nullcontext()) if sharder is None else sharder.whole)


def _is_four_bit(module: Any) -> bool:
    return type(module).__name__ == "Linear4bit" and type(module).__module__.startswith("bitsandbytes")


def _allocate(module: nn.Module, device: torch.device, created: Created, blank: list[torch.Tensor]) -> None:
    """Allocate the tensors that `module` holds directly; modules that share a parameter find it in `created`. Buffers,
    which nothing has been written to, are added to `blank`."""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            shared = created.get(id(parameter))
            if shared is None:
                shared = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
                created[id(parameter)] = shared
            module._parameters[name] = shared
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = storage = torch.empty_like(buffer, device=device)
            blank.append(storage)
