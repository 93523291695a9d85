"""The loss kernels: cross-entropy over the vocabulary from hidden states, with all logits at once or without."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from autofit.techniques.losses.chunked_cross_entropy import chunked_cross_entropy, saves_memory
from autofit.techniques.technique import IGNORE_INDEX, Head

if TYPE_CHECKING:
    from autofit.techniques.technique import LossKernel


def full_cross_entropy(hidden: torch.Tensor, head: Head, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropy in nats. hidden [tokens, hidden_size], labels [tokens]; logits are widened to fp32."""
    logits = functional.linear(hidden, head.weight, head.bias)
    if head.scale != 1.0:
        logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return functional.cross_entropy(logits.float(), labels, ignore_index=IGNORE_INDEX, reduction="sum")


def lighter_cross_entropy(hidden: torch.Tensor, head: Head, labels: torch.Tensor) -> torch.Tensor:
    """The same, with a few rows of logits at a time if that needs less memory than all of them."""
    if saves_memory(hidden, head.weight):
        return chunked_cross_entropy(hidden, head, labels)
    return full_cross_entropy(hidden, head, labels)


def fused_cross_entropy(hidden: torch.Tensor, head: Head, labels: torch.Tensor) -> torch.Tensor:
    """The loss by Liger's fused linear cross-entropy (Hsu et al. 2024), which never holds all logits."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return fused_by(liger_fused_linear_cross_entropy, hidden, head, labels)


def fused_by(
    kernel: Callable[..., torch.Tensor], hidden: torch.Tensor, head: Head, labels: torch.Tensor
) -> torch.Tensor:
    """The loss by `kernel`: Liger's or, in an estimate, which has no device, its stand-in."""
    weight, bias = head.weight, head.bias
    if torch.is_autocast_enabled(hidden.device.type):
        # The kernel's own autocast handling casts the inputs but not the gradient buffers that it allocates.
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = bias.to(dtype) if bias is not None else None
    if head.scale != 1.0:
        hidden = hidden * head.scale
    return kernel(hidden, weight, labels, bias=bias, ignore_index=IGNORE_INDEX, reduction="sum", softcap=head.softcap)


KERNELS: dict[str, LossKernel] = {
    "full": full_cross_entropy,
    "chunked": lighter_cross_entropy,
    "fused": fused_cross_entropy,
}
