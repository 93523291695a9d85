"""Liger's fused linear cross-entropy without Liger: an operation that allocates what its kernel allocates.

The kernel itself is in Triton, for devices only. This does what fused_linear_cross_entropy_forward and _backward of
liger_kernel/ops/fused_linear_cross_entropy.py (0.8.5) do on CUDA: every tensor has the same lifetime, and what a Triton
kernel does in place is an in-place operation that moves as many bytes.
"""

from __future__ import annotations

from typing import Any

import torch


def chunk_rows(tokens: int, hidden_size: int, vocabulary: int) -> int:
    """Rows of logits per chunk: a power of two that makes a chunk about as large as all hidden states."""
    logits_per_hidden = -(-vocabulary // hidden_size)
    rows = -(-tokens // logits_per_hidden)
    return min(tokens, 1 << (rows - 1).bit_length())


def fused_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    adds_products: bool,
    bias: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """Stands in for liger_fused_linear_cross_entropy: an fp32 scalar without meaning. hidden [tokens, hidden_size],
    weight [vocabulary, hidden_size], labels [tokens].

    `adds_products`: 16-bit products are added to the head's gradient as they are computed, as from compute capability
    8.0 on. Otherwise each is first a tensor of its own, which is widened to fp32.
    """
    in_place = adds_products and weight.dtype.itemsize == 2
    loss: torch.Tensor = _Function.apply(hidden, weight, labels, bias, in_place)  # type: ignore[no-untyped-call]
    return loss


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None,
        in_place: bool,
    ) -> torch.Tensor:
        tokens, hidden_size = hidden.shape
        vocabulary = weight.shape[0]
        rows = chunk_rows(tokens, hidden_size, vocabulary)
        trains = hidden.requires_grad
        grad_hidden = torch.zeros_like(hidden)  # also in an evaluation, where it stays empty
        grad_weight = torch.zeros_like(weight) if trains and weight.requires_grad else None
        grad_bias = torch.zeros_like(bias) if trains and bias is not None else None
        losses = torch.zeros(tokens, dtype=torch.float32)
        counted = labels != 0
        counted.sum()
        chunk = torch.empty(rows, vocabulary, dtype=hidden.dtype)
        for start in range(0, tokens, rows):
            inputs = hidden[start : start + rows]
            logits = chunk[: inputs.shape[0]].addmm_(inputs, weight.t(), beta=0)
            if bias is not None:
                logits.add_(bias)
            logits.add_(logits)  # becomes its gradient: read twice and written once
            if trains:
                grad_hidden[start : start + rows].addmm_(logits, weight, beta=0)
            if grad_weight is not None and in_place:
                grad_weight.addmm_(logits.t(), inputs)
            elif grad_weight is not None:
                grad_weight += torch.mm(logits.t(), inputs).float()
            if grad_bias is not None:
                grad_bias += logits.sum(dim=0)
        del chunk, logits
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return torch.sum(losses)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        for grad in (grad_hidden, grad_weight, grad_bias):
            if grad is not None:
                grad.mul_(grad_outputs[0])
        return grad_hidden, grad_weight, None, grad_bias, None
