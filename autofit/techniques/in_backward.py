"""Updates within the backward pass: no more than a few gradients are alive at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class UpdatesInBackward(torch.optim.Optimizer):
    """An optimizer for each of `parameters`. It takes its step as soon as autograd has accumulated the parameter's
    gradient, which is then freed (Lv et al. 2023, arXiv:2306.09782).

    Its groups are those of the optimizers, so a schedule of learning rates works on them.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        """`make` returns an optimizer for a list of one parameter."""
        self.of = {parameter: make([parameter]) for parameter in parameters}
        super().__init__(list(self.of), {})
        self._share_groups()
        self.is_active = True
        """Whether gradients are used up as they come; otherwise they accumulate as usual."""
        self.gradient_norm = torch.zeros(())
        """L2 norm of all gradients of the last step, fp32 scalar."""
        self._norms: list[torch.Tensor] = []
        for parameter in self.of:
            parameter.register_post_accumulate_grad_hook(self._update)  # type: ignore[no-untyped-call]

    def _update(self, parameter: nn.Parameter) -> None:
        if self.is_active and parameter.grad is not None:
            self._norms.append(torch.linalg.vector_norm(parameter.grad))
            self.of[parameter].step()
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """End a step whose updates are made."""
        self.gradient_norm = torch.linalg.vector_norm(torch.stack(self._norms)).float()
        self._norms.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.of.values()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.of.values(), state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._share_groups()  # each has new ones

    def _share_groups(self) -> None:
        self.param_groups = [group for optimizer in self.of.values() for group in optimizer.param_groups]
