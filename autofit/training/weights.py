"""Random weights on the device, in their final format, for a model that was laid out on the meta device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from autofit.errors import UsageError
from autofit.techniques import adapters, quantisation

STD = 0.02
"""Standard deviation of quantised random weights: transformers' default initializer_range."""


def materialise(model: nn.Module, *, device: torch.device) -> None:
    """Give every parameter and buffer of `model` storage on `device`, and its architecture's own initial values.

    Each tensor is created on `device` in the dtype it has on the meta device: nothing passes through host memory or
    through fp32. 4-bit layers are quantised one at a time.
    """
    causal_lm = unwrap(model)
    four_bit: list[Any] = [m for m in model.modules() if _is_four_bit(m)]
    for module in model.modules():
        if module not in four_bit:
            _allocate(module, device)
    for layer in four_bit:
        if layer.bias is not None:
            layer.bias = nn.Parameter(torch.zeros_like(layer.bias, device=device), requires_grad=False)
        quantisation.materialise(layer, device=device, dtype=layer.compute_dtype, std=STD)
        # transformers skips what is marked, so that initialisation does not touch packed weights.
        layer._is_hf_initialized = True
    causal_lm.tie_weights()
    causal_lm.initialize_weights()
    _check_buffers(model)
    if causal_lm is not model:
        adapters.initialise(model)


def unwrap(model: Any) -> Any:
    """The transformers model inside a peft model; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _is_four_bit(module: Any) -> bool:
    return type(module).__name__ == "Linear4bit" and type(module).__module__.startswith("bitsandbytes")


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Storage for the tensors that `module` itself holds; ties are made anew by `tie_weights`."""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            empty = torch.empty_like(parameter, device=device)
            module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            storage = torch.empty_like(buffer, device=device)
            # What is still NaN after the initialisation was not initialised.
            module._buffers[name] = storage.fill_(math.nan) if buffer.is_floating_point() else storage


def _check_buffers(model: nn.Module) -> None:
    """Raise `UsageError` for constants that transformers does not restore: wrong ones would train something else."""
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and buffer.isnan().all():
            raise UsageError(
                f"{type(unwrap(model)).__name__} has a constant that transformers does not restore: {name}"
            )
