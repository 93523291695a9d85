"""MLPs computed in tiles of the sequence, each once more in the backward pass. Exported scripts hold this verbatim."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch


def tile_mlps(mlps: Iterable[Any]) -> None:
    """Have `mlps`, which map [sequences, tokens, hidden_size] token by token, compute a part of each sequence at once:
    equal parts of at most `hidden_size` tokens."""
    for mlp in mlps:
        # What a module calls in place of `forward` and its hooks, so that Liger may replace `forward` later.
        mlp._compiled_call_impl = partial(in_tiles, mlp)


def in_tiles(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What `mlp` makes of `hidden`. For gradients in evaluation mode, where nothing is checkpointed either, and where
    `hidden` needs none, it is computed as a whole."""
    if torch.is_grad_enabled() and not (mlp.training and hidden.requires_grad):
        return mlp.forward(hidden)  # type: ignore[no-any-return]
    sequences, seq_len, width = hidden.shape
    size = sequences * math.ceil(seq_len / math.ceil(seq_len / width))
    tokens = hidden.flatten(0, -2)
    kept = KeptInput.apply(tokens)  # type: ignore[no-untyped-call]
    output: torch.Tensor = TiledMlp.apply(tokens, (kept,), mlp, size)  # type: ignore[no-untyped-call]
    return output.view(*hidden.shape[:-1], -1)


class KeptInput(torch.autograd.Function):
    """Keeps an MLP's input for its backward pass before the MLP is computed. The recomputation of a checkpointed layer
    ends once it has everything that was kept, and so need not compute the MLP."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        return tokens.new_empty(0)


class TiledMlp(torch.autograd.Function):
    """An MLP in tiles of `size` tokens. The backward pass adds to the weights' gradients tile by tile."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, kept: tuple[torch.Tensor], mlp: Any, size: int) -> torch.Tensor:
        device = tokens.device.type
        ctx.kept, ctx.mlp, ctx.size = kept, mlp, size
        ctx.autocast = {
            "device_type": device,
            "dtype": torch.get_autocast_dtype(device),
            "enabled": torch.is_autocast_enabled(device),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        outputs = map(mlp.forward, tokens.split(size))  # type: ignore[no-untyped-call]
        first = next(outputs)
        joined = torch.empty_like(tokens, dtype=first.dtype)
        for slot, output in zip(joined.split(size), chain((first,), outputs), strict=True):  # type: ignore[no-untyped-call]
            slot.copy_(output)
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (tokens,) = ctx.kept[0].grad_fn.saved_tensors
        del ctx.kept  # which would keep the tokens
        of_tokens = torch.empty_like(tokens)
        parts = (tensor.split(ctx.size) for tensor in (tokens, of_tokens, gradients[0]))
        for tile, of_tile, gradient in zip(*parts, strict=True):
            of_tile.copy_(tile_gradient(ctx.mlp, tile, gradient, ctx.autocast))
        return of_tokens, None, None, None


def tile_gradient(mlp: Any, tile: torch.Tensor, gradient: torch.Tensor, autocast: dict[str, Any]) -> Any:
    """The gradient of a tile's input, given that of its output. Its results are freed before the next tile's."""
    leaf = tile.detach().requires_grad_()
    with torch.enable_grad(), torch.autocast(**autocast):
        output = mlp.forward(leaf)
    torch.autograd.backward(output, gradient)
    return leaf.grad
