"""One file per library that can own the gradients and the update; this one chooses among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.training.engine import Engine
from autofit.training.weights import Sharder

if TYPE_CHECKING:
    from torch import nn

    from autofit.techniques.technique import BuildPlan


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
        from autofit.training.engines.ddp import DdpEngine

        return DdpEngine(module, plan)
    if plan.deepspeed is not None:
        from autofit.training.engines.zero import ZeroEngine

        return ZeroEngine(module, plan)
    from autofit.training.engines.local import LocalEngine

    return LocalEngine(module, plan)
