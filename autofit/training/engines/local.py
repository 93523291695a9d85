"""One device, updated by torch's ordinary optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from autofit.techniques.axes.optimizer import trainable
from autofit.techniques.technique import MAX_GRADIENT_NORM

if TYPE_CHECKING:
    from autofit.techniques.technique import BuildPlan


class LocalEngine:
    """Plain torch; the engines that keep torch's optimizers build on it and add the ranks."""

    ranks = 1

    def __init__(self, root: nn.Module, plan: BuildPlan) -> None:
        self.root = root
        self.optimizer = plan.optimizer(root)
        self._trainable = trainable(root)
        device = next(root.parameters()).device.type
        self._scaler = torch.amp.GradScaler(device, enabled=plan.loss_scaling)

    def prepare(self, *, last: bool) -> None:
        """Nothing to do: there are no other ranks to wait for."""

    def backward(self, loss: torch.Tensor) -> None:
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self) -> torch.Tensor:
        self._scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self._trainable, MAX_GRADIENT_NORM)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.detach().float()

    def discard(self) -> torch.Tensor:
        """Free the gradients without an update; returns their L2 norm, fp32 scalar."""
        gradients = [p.grad for p in self._trainable if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).detach().float() / self._scaler.get_scale()
        self.optimizer.zero_grad(set_to_none=True)
        return norm
