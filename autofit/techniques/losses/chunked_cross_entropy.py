"""Cross-entropy over the vocabulary that never holds all logits, on any device torch runs on.

The gradient is computed together with the loss, chunk by chunk, so that one chunk's logits are freed before the next
chunk's are created. The algorithm is that of Liger's fused linear cross-entropy (Hsu et al. 2024, arXiv:2410.10989,
section 3.2), written in plain torch operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from autofit.techniques.losses.chunks import chunk_rows, chunks_save
from autofit.techniques.technique import IGNORE_INDEX, Head

STRIPE = 16_384
"""Rows of the head's gradient that are widened at a time, where the sum has a wider dtype than its terms."""


def saves_memory(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether chunks need less than all logits. hidden [tokens, hidden_size]; weight [vocabulary, hidden_size]."""
    tokens, hidden_size = hidden.shape
    early_bytes = hidden.nbytes + (weight.nbytes if weight.requires_grad else 0)
    return chunks_save(tokens, hidden_size, weight.shape[0], early_bytes)


def chunked_cross_entropy(hidden: torch.Tensor, head: Head, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropy in nats, fp32 scalar. hidden [tokens, hidden_size], labels [tokens].

    The head's bias gets no gradient here; raises `ValueError` if it needs one.
    """
    if head.bias is not None and head.bias.requires_grad and torch.is_grad_enabled():
        raise ValueError("loss=chunked does not train the bias of an output head: use loss=full")
    loss: torch.Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, labels, head.softcap, head.scale, torch.is_grad_enabled()
    )
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        softcap: float | None,
        scale: float,
        with_gradient: bool,
    ) -> torch.Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        with torch.autocast(device, enabled=False):
            rows = chunk_rows(hidden.shape[0], hidden.shape[1], weight.shape[0])
            narrow = weight.to(dtype)
            grad_hidden = torch.empty_like(hidden) if with_gradient and ctx.needs_input_grad[0] else None
            grad_weight = torch.zeros_like(weight) if with_gradient and ctx.needs_input_grad[1] else None
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            for start in range(0, hidden.shape[0], rows):
                part = slice(start, start + rows)
                inputs = hidden[part].to(dtype)
                logits = functional.linear(inputs, narrow, bias.to(dtype) if bias is not None else None).float()
                total += _loss_and_gradient(logits, labels[part], softcap, scale)
                if grad_hidden is None and grad_weight is None:
                    continue
                grad_logits = logits.to(dtype)
                del logits
                if grad_hidden is not None:
                    grad_hidden[part] = grad_logits @ narrow
                if grad_weight is not None:
                    _accumulate(grad_weight, grad_logits, inputs)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        # In place: the buffers belong to this node alone, and a copy of the head's gradient would double its memory.
        # The fp32 scalar is not first rounded to the buffers' dtype: the error would affect the whole gradient.
        grads = ctx.saved_tensors
        for grad in grads:
            if grad is not None:
                grad.mul_(grad_outputs[0])
        return *grads, None, None, None, None, None


def _loss_and_gradient(logits: torch.Tensor, labels: torch.Tensor, softcap: float | None, scale: float) -> torch.Tensor:
    """The chunk's summed loss; `logits` (fp32, before scale and softcap) is overwritten with its gradient."""
    slope: torch.Tensor | None = None
    if scale != 1.0:
        logits.mul_(scale)
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = 1.0 - logits * logits
        logits.mul_(softcap)
    counted = labels != IGNORE_INDEX
    index = labels.clamp(min=0).unsqueeze(1)
    log_sum = torch.logsumexp(logits, dim=1)
    loss = ((log_sum - logits.gather(1, index).squeeze(1)) * counted).sum()
    logits.sub_(log_sum.unsqueeze(1)).exp_()
    logits.scatter_add_(1, index, torch.full_like(index, -1, dtype=logits.dtype))
    logits.mul_(counted.unsqueeze(1))
    if slope is not None:
        logits.mul_(slope)
    if scale != 1.0:
        logits.mul_(scale)
    return loss


def _accumulate(total: torch.Tensor, grad_logits: torch.Tensor, inputs: torch.Tensor) -> None:
    """Add grad_logits.T @ inputs to `total`, without a temporary of the head's size."""
    if total.dtype == grad_logits.dtype:
        total.addmm_(grad_logits.T, inputs)
        return
    for stripe, columns in zip(torch.split(total, STRIPE), torch.split(grad_logits, STRIPE, dim=1), strict=True):
        stripe += columns.T @ inputs
