"""A model's stack of decoder layers: listing them, telling their kinds apart, and keeping only some of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, cast

from torch import nn

from autofit.core.errors import UsageError

_OF_POSITION = frozenset({"layer_idx", "training"})
"""Attributes that may differ between layers of the same kind."""

_TYPES_OF_LAYERS = "layer_types", "layers_block_type"
"""Fields of configs in transformers that list a type for each layer."""


def decoder_layers(model: nn.Module) -> list[Any]:
    """The decoder layers of a transformers or peft model, first to last."""
    return list(_stack(model))


def kind(layer: nn.Module) -> Hashable:
    """What determines a layer's behaviour: its parameters' shapes and dtypes, and its modules' scalar settings."""
    settings = tuple(
        (name, type(module).__name__, attribute, value)
        for name, module in layer.named_modules()
        for attribute, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float, str)) and attribute not in _OF_POSITION
    )
    return tuple((n, tuple(p.shape), p.dtype) for n, p in layer.named_parameters()), settings


def keep_layers(model: nn.Module, indices: Sequence[int]) -> None:
    """Drop all decoder layers of `model` (a transformers model on the meta device) except those at `indices`."""
    stack = _stack(model)
    replace_layers(model, [stack[index] for index in indices])
    config = cast(Any, model).config.get_text_config()
    # Read before the number of layers changes: some configs compute them from it.
    names = {config.attribute_map.get(name, name) for name in _TYPES_OF_LAYERS}
    types = {name: list(given) for name in names if (given := getattr(config, name, None))}
    config.num_hidden_layers = len(indices)
    for name, given in types.items():
        kept = [given[index] for index in indices]
        if isinstance(getattr(type(config), name, None), property):
            config.__class__ = type(type(config).__name__, (type(config),), {name: kept})
        else:
            setattr(config, name, kept)


def replace_layers(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    _stack(model)._modules = {str(place): layer for place, layer in enumerate(layers)}


def _stack(model: nn.Module) -> nn.ModuleList:
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) and isinstance(module[0], GradientCheckpointingLayer):
            return module
    raise UsageError(f"{type(model).__name__} has no stack of decoder layers")
