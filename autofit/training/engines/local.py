"""Torch's own optimizers: on one device, or on every rank of DistributedDataParallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autofit.techniques.axes.optimizer import trainable
from autofit.techniques.in_backward import UpdatesInBackward
from autofit.techniques.technique import MAX_GRADIENT_NORM, BuildPlan


class LocalEngine:
    """One device; the engines that keep torch's optimizers build on it and add the ranks."""

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


class InBackwardEngine(LocalEngine):
    """`backward` updates the weights if `prepare` was called before, and otherwise leaves gradients as usual."""

    optimizer: UpdatesInBackward

    def __init__(self, root: nn.Module, plan: BuildPlan) -> None:
        super().__init__(root, plan)
        self.optimizer.is_active = False

    def prepare(self, *, last: bool) -> None:
        self.optimizer.is_active = True

    def update(self) -> torch.Tensor:
        """The norm of the gradients that the backward pass has used up; nothing was clipped."""
        self.optimizer.is_active = False
        self.optimizer.step()
        return self.optimizer.gradient_norm


class DdpEngine(LocalEngine):
    """Gradients are views of the reduction buckets (`gradient_as_bucket_view`), unless a trainer has them apart.

    All ranks have the same gradients after the reduction, hence the same norm and the same overflow decision of the
    gradient scaler.
    """

    def __init__(self, root: nn.Module, plan: BuildPlan) -> None:
        super().__init__(root, plan)
        self.ranks = dist.get_world_size()
        self.root = self._wrapped = DistributedDataParallel(root, gradient_as_bucket_view=plan.bucket_views)

    def prepare(self, *, last: bool) -> None:
        """Reduce the gradients in the backward pass of the last micro-batch only. This sets the flag that `no_sync`
        sets, which would have to enclose the forward pass as well."""
        self._wrapped.require_backward_grad_sync = last

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of `loss`. DDP averages over ranks; the factor turns that into a sum, as in
        transformers' Trainer."""
        super().backward(loss * self.ranks)
