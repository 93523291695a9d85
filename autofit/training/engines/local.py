"""One device, updated by torch's ordinary optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autofit.techniques.technique import MAX_GRADIENT_NORM
from autofit.training.engine import Resident

if TYPE_CHECKING:
    from autofit.techniques.technique import BuildPlan


class LocalEngine:
    """Plain torch; the engines that keep torch's optimizers build on it and add the ranks."""

    ranks = 1

    def __init__(self, root: nn.Module, plan: BuildPlan) -> None:
        self.root = root
        self.optimizer = plan.optimizer(root)
        self._trainable = [p for p in root.parameters() if p.requires_grad]
        device = next(root.parameters()).device.type
        self._scaler = torch.amp.GradScaler(device, enabled=plan.loss_scaling)

    def prepare(self, *, last: bool) -> None:
        """Nothing to do: there are no other ranks to wait for."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Accumulate the gradients of `loss`."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self) -> torch.Tensor:
        """Take one optimizer step and free the gradients; returns their L2 norm before clipping, fp32 scalar."""
        self._scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self._trainable, MAX_GRADIENT_NORM)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.detach().float()

    def discard(self) -> torch.Tensor:
        """Free the gradients without an update; returns their L2 norm, fp32 scalar."""
        found = [p.grad for p in self._trainable if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(found).detach().float() / self._scaler.get_scale()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def resident(self) -> Resident:
        """What this device holds at this moment."""
        return Resident(
            parameters=held(self.root.parameters()) + quantisation_bytes(self.root),
            gradients=held(p.grad for p in self._trainable if p.grad is not None),
            optimizer=held(states(self.optimizer)),
        )


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of `tensors` on this rank; a sharded tensor counts with its local shard only."""
    return sum(local(tensor).nbytes for tensor in tensors)


def local(tensor: Any) -> torch.Tensor:
    """This rank's shard of a sharded tensor; any other tensor itself."""
    shard: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The states of all parameters, without the step counts, which are scalars, and bitsandbytes' maps of 8-bit values:
    2 KiB, to which every parameter's state refers."""
    found = [
        t
        for state in optimizer.state.values()
        for name, t in state.items()
        if isinstance(t, torch.Tensor) and not name.startswith("qmap")
    ]
    return [t for t in found if t.dim() > 0]


def quantisation_bytes(model: nn.Module) -> int:
    """Bytes of the constants that dequantise the 4-bit weights of `model`; every rank holds all of them."""
    return sum(_constants(module.quant_state) for module in model.modules() if getattr(module, "quant_state", None))


def _constants(state: Any) -> int:
    nested = [state.state2.absmax, state.state2.code, state.offset] if state.nested else []
    return sum(t.nbytes for t in (state.absmax, state.code, *nested))
