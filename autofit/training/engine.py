"""Who owns gradients and the update: torch itself on one device, a sharding library on several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """Bytes that one rank's engine holds at this moment, whatever their purpose: a shard, or all where nothing is
    sharded. Gradients are there between `backward` and `update`, states from the first update on."""

    parameters: int
    """On the device, with the constants of quantised ones; not what is gathered for a moment."""
    gradients: int
    """On the device."""
    optimizer: int
    """States and, where the library keeps the parameters a second time, the master copies; on the device."""
    host_parameters: int = 0
    host_gradients: int = 0
    host_optimizer: int = 0


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

    def prepare(self, *, last: bool) -> None:
        """Called before the forward pass of every micro-batch; `last` says that the update follows its backward pass,
        so that ranks synchronise only then: some libraries decide that in the forward pass."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of `loss`; `last` is what `prepare` was told."""

    def update(self) -> torch.Tensor:
        """One optimizer step; frees the gradients. Their L2 norm over all ranks before clipping, fp32 scalar.

        Not finite where loss scaling overflowed: then nothing was updated.
        """

    def resident(self) -> Resident:
        """What this rank holds now."""
