"""What owns the gradients and the update, torch itself or a sharding library: what they do, and which one is chosen."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from autofit.techniques.axes.update import updates_in_backward
from autofit.techniques.technique import BuildPlan
from autofit.training.engines.local import DdpEngine, InBackwardEngine, LocalEngine
from autofit.training.weights import Sharder


class Engine(Protocol):
    """The part of a training step that a sharding library replaces.

    Gradients are summed over ranks, not averaged: the loss is already divided by the number of targets on all ranks. A
    DeepSpeed engine wraps `root` itself, synchronises gradients in `backward` and partitions states in `update`. Each
    rank's engine is used from a single thread.
    """

    root: nn.Module
    """The module whose forward is called."""
    ranks: int
    """Number of data-parallel ranks that share a global batch."""

    def prepare(self, *, last: bool) -> None:
        """Called before the forward pass of every micro-batch. `last` says that the update follows this micro-batch's
        backward pass, so that ranks synchronise only then; some libraries decide this in the forward pass."""

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of `loss`."""

    def update(self) -> torch.Tensor:
        """Take one optimizer step and free the gradients; their L2 norm over all ranks before clipping, fp32 scalar.

        The norm is not finite if loss scaling overflowed, in which case nothing was updated.
        """


def sharder(plan: BuildPlan) -> Sharder | None:
    """The sharder used while a model is built; None where every rank holds all of it."""
    if plan.config.text("sharding").startswith("fsdp"):
        from autofit.training.engines.fsdp import FsdpSharder

        return FsdpSharder(plan)
    if plan.deepspeed is not None:
        from autofit.training.engines.zero import ZeroSharder

        return ZeroSharder(plan)
    return None


def make(module: nn.Module, plan: BuildPlan) -> Engine:
    """The engine that `plan` calls for, for `module`, whose weights already exist."""
    if plan.config.text("sharding").startswith("fsdp"):
        from autofit.training.engines.fsdp import FsdpEngine

        return FsdpEngine(module, plan)
    if plan.config["sharding"] == "ddp":
        return DdpEngine(module, plan)
    if plan.deepspeed is not None:
        from autofit.training.engines.zero import ZeroEngine

        return ZeroEngine(module, plan)
    return make_local(module, plan)


def make_local(module: nn.Module, plan: BuildPlan) -> LocalEngine:
    """The engine of one device."""
    return (InBackwardEngine if updates_in_backward(plan.config) else LocalEngine)(module, plan)
