"""One device, on which each parameter is updated within the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from autofit.techniques.in_backward import UpdatesInBackward
from autofit.training.engines.local import LocalEngine

if TYPE_CHECKING:
    from autofit.techniques.technique import BuildPlan


class InBackwardEngine(LocalEngine):
    """`backward` updates the weights if `prepare` was called before, and otherwise leaves gradients as usual."""

    optimizer: UpdatesInBackward

    def __init__(self, root: nn.Module, plan: BuildPlan) -> None:
        super().__init__(root, plan)
        self.optimizer.is_active = False

    def prepare(self, *, last: bool) -> None:
        """Have the next backward pass update."""
        self.optimizer.is_active = True

    def update(self) -> torch.Tensor:
        """The norm of the gradients that the backward pass has used up; nothing was clipped."""
        self.optimizer.is_active = False
        self.optimizer.step()
        return self.optimizer.gradient_norm
