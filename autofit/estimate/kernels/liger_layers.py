"""Liger's kernels of decoder layers without Liger: operations that allocate and keep what its kernels do.

These do what ops/rms_norm.py, ops/swiglu.py, ops/geglu.py and ops/rope.py of liger_kernel 0.8.5 do on CUDA, with the
same tensors at the same times; what a Triton kernel does is an in-place operation that moves about as many bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from autofit.core.lattice import Config
from autofit.estimate.kernels.column_sums import MULTIPROCESSORS
from autofit.techniques.adapters import unwrap
from autofit.techniques.axes.kernels import by_liger
from autofit.techniques.liger_layers import ROTARY

COPIES_GRADIENT = ("gemma2", "gemma3_text")
"""Architectures whose norms may not write the gradient of their input over that of their output: two follow one another
in the residual stream (apply_liger_kernel_to_gemma2 of liger_kernel/transformers/monkey_patch.py, 0.8.5)."""


def liger_layers(config: Config, model: Any) -> AbstractContextManager[None]:
    """Inside, the decoder layers of `model` compute as Liger's kernels do, if the config has them."""
    return replaced(model) if by_liger(config) else nullcontext()


@contextmanager
def replaced(model: Any) -> Iterator[None]:
    """Inside, every norm, gated MLP and rotary embedding of a transformers or peft model is one of these."""
    causal_lm = unwrap(model)
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys.modules[type(causal_lm).__module__], ROTARY, _rotated))
        for module in causal_lm.modules():
            forward: Any = None
            if type(module).__name__.endswith("RMSNorm"):
                forward = partial(_normed, module, in_place(causal_lm))
            elif hasattr(module, "down_proj"):
                forward = partial(_gated, module)
            if forward is not None:
                stack.enter_context(patch.object(module, "forward", forward))
        yield


def in_place(causal_lm: Any) -> bool:
    """Whether a norm writes the gradient of its input over that of its output."""
    return causal_lm.config.model_type not in COPIES_GRADIENT


def _normed(module: nn.Module, in_place: bool, hidden: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _RmsNorm.apply(hidden, module.weight, in_place)  # type: ignore[no-untyped-call]
    return result


def _gated(module: Any, hidden: torch.Tensor) -> Any:
    """A gated MLP, whose two input projections may be one (Phi 3). As in Liger's modules, only what such a
    one gives is held while the output projection runs without gradients."""
    if hasattr(module, "gate_up_proj"):
        halves = module.gate_up_proj(hidden).chunk(2, dim=-1)
        return module.down_proj(_gate(*halves))
    return module.down_proj(_gate(module.gate_proj(hidden), module.up_proj(hidden)))


def _gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = _Gate.apply(gate, up)  # type: ignore[no-untyped-call]
    return product


def _rotated(
    queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    rotated: tuple[torch.Tensor, torch.Tensor] = _Rotary.apply(queries, keys, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, in_place: bool) -> torch.Tensor:
        hidden = hidden.contiguous()
        rows = hidden.view(-1, hidden.shape[-1])
        normed = torch.empty_like(rows)
        scales = torch.empty(rows.shape[0], dtype=torch.float32)
        normed.copy_(rows)
        ctx.save_for_backward(hidden, weight, scales)
        ctx.in_place = in_place
        return normed.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, _ = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        sums = None
        if ctx.needs_input_grad[1]:
            # Each multiprocessor sums its own; on other cards of the catalog they are up to 3 MiB smaller, for as long
            # as this takes, at a hidden size of 8,192.
            sums = torch.empty(MULTIPROCESSORS, hidden.shape[-1], dtype=torch.float32)
        of_hidden = gradient if ctx.in_place else torch.zeros_like(gradient)
        of_hidden.add_(hidden)
        # A view, to which autograd adds no other gradient in place.
        return of_hidden.view(hidden.shape), None if sums is None else sums.sum(dim=0).to(weight.dtype), None


class _Gate(torch.autograd.Function):
    """An activation times another projection. Both gradients are written over what was kept."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        product = torch.empty_like(gate)
        product.add_(up)
        ctx.save_for_backward(gate, up)
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        return gate.mul_(gradient), up.mul_(gradient)


class _Rotary(torch.autograd.Function):
    """Rotates in place: what it returns are its arguments, and so are the gradients."""

    @staticmethod
    def forward(
        ctx: Any, queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return _in_memory_order(queries), _in_memory_order(keys)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_queries, of_keys = gradients
        return _in_memory_order(of_queries), _in_memory_order(of_keys), None, None


def _in_memory_order(heads: torch.Tensor) -> torch.Tensor:
    """Heads [sequences, heads, seq_len, width] as the kernel rotates them: sequence by sequence."""
    return heads.transpose(1, 2).contiguous().mul_(1).transpose(1, 2)
