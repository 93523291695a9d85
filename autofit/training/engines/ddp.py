"""Every rank holds the whole model; gradients are summed over the ranks (torch's DistributedDataParallel)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autofit.training.engines.local import LocalEngine

if TYPE_CHECKING:
    from autofit.techniques.technique import BuildPlan


class DdpEngine(LocalEngine):
    """Gradients are views of the reduction buckets (`gradient_as_bucket_view`), unless a trainer has them apart.

    All ranks have the same gradients after the reduction, hence the same norm and the same overflow decision of the
    gradient scaler.
    """

    def __init__(self, root: nn.Module, plan: BuildPlan) -> None:
        super().__init__(root, plan)
        self.ranks = dist.get_world_size()
        self._wrapped = DistributedDataParallel(root, gradient_as_bucket_view=plan.bucket_views)
        self.root = self._wrapped

    def prepare(self, *, last: bool) -> None:
        """Reduce the gradients in the backward pass of the last micro-batch only. This sets the flag that `no_sync`
        sets, which would have to enclose the forward pass as well."""
        self._wrapped.require_backward_grad_sync = last

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of `loss`. DDP averages over ranks; the factor turns that into a sum, as in
        transformers' Trainer."""
        super().backward(loss * self.ranks)
