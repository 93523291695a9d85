"""Fake weights for a model that was built on the meta device: every format and size, no data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autofit.techniques import quantisation
from autofit.techniques.adapters import unwrap


def materialise(model: nn.Module) -> None:
    """Replace every parameter and buffer of `model` by a fake one on the CPU. Called inside a fake tensor mode."""
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            _four_bit(module)
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(_like(parameter), requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _like(buffer)
    unwrap(model).tie_weights()


def empty(
    mode: FakeTensorMode, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    """`torch.empty_strided`, but not by dispatch: for each of hundreds of parameters that takes half a millisecond."""
    with torch._C._DisableTorchDispatch():
        on_meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, on_meta, device)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _four_bit(layer: Any) -> None:
    """bitsandbytes' own packing and state, so that its own forward and backward are traced."""
    from bitsandbytes.functional import QuantState

    weights = layer.out_features * layer.in_features
    scales = -(-weights // quantisation.BLOCK)
    second = QuantState(
        absmax=torch.empty(-(-scales // quantisation.SCALES_BLOCK), dtype=torch.float32),
        code=torch.empty(256, dtype=torch.float32),
        blocksize=quantisation.SCALES_BLOCK,
        dtype=torch.float32,
    )
    packed = nn.Parameter(torch.empty(-(-weights // 2), 1, dtype=torch.uint8), requires_grad=False)
    packed.quant_state = QuantState(  # type: ignore[attr-defined]
        absmax=torch.empty(scales, dtype=torch.uint8),
        shape=torch.Size((layer.out_features, layer.in_features)),
        code=torch.empty(16, dtype=torch.float32),
        blocksize=quantisation.BLOCK,
        quant_type="nf4",
        dtype=layer.compute_dtype,
        offset=torch.empty((), dtype=torch.float32),
        state2=second,
    )
    layer._parameters["weight"] = packed
    layer.compute_type_is_set = True
    if layer.bias is not None:  # in the format that `Linear4bit.forward` leaves it in for good when it first runs
        bias = torch.empty(layer.bias.shape, dtype=layer.compute_dtype)
        layer._parameters["bias"] = nn.Parameter(bias, requires_grad=False)


def quantised_tensors(layer: Any) -> list[torch.Tensor]:
    """The tensors that a 4-bit layer keeps besides its parameters."""
    state = layer.weight.quant_state
    return [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
