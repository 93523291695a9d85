"""Who owns gradients and the update: torch itself on one device, a sharding library on several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from autofit.techniques.technique import MAX_GRADIENT_NORM

if TYPE_CHECKING:
    from autofit.techniques.technique import OptimizerFactory


class Engine(Protocol):
    """The part of a training step that a sharding library replaces.

    Gradients are summed over ranks, not averaged: the loss is already divided by the targets of all of them. A
    DeepSpeed engine wraps `root` itself, synchronises gradients in `backward` and partitions states in `update`;
    one rank's engine is used from one thread.
    """

    root: nn.Module
    """What forward is called on."""
    ranks: int
    """Data-parallel ranks that share a global batch."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of `loss`; `last` says that the update follows, so that ranks synchronise only then."""

    def update(self) -> torch.Tensor:
        """One optimizer step; frees the gradients. Their L2 norm over all ranks before clipping, fp32 scalar.

        Not finite where loss scaling overflowed: then nothing was updated.
        """


class LocalEngine:
    """One device, torch's own optimizers."""

    ranks = 1

    def __init__(self, root: nn.Module, make_optimizer: OptimizerFactory, *, loss_scaling: bool) -> None:
        self.root = root
        self.optimizer = make_optimizer(root)
        self._trainable = [p for p in root.parameters() if p.requires_grad]
        device = next(root.parameters()).device.type
        self._scaler = torch.amp.GradScaler(device, enabled=loss_scaling)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of `loss`."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self) -> torch.Tensor:
        """One optimizer step; frees the gradients. Their L2 norm before clipping, fp32 scalar."""
        self._scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self._trainable, MAX_GRADIENT_NORM)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.detach().float()
