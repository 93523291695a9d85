"""The habit of running the forward pass under autocast whatever the weights' format."""

from __future__ import annotations

from autofit.core.lattice import Config
from autofit.techniques.axes.sharding import has_own_mixed_precision
from autofit.techniques.habits.habit import Habit
from autofit.techniques.technique import BuildPlan


class UnderAutocast(Habit):
    """Products of bf16 weights run under autocast too, which then computes norms and losses of bf16 states in fp32:
    `bf16: true` reaches transformers' Trainer as `bf16` (src/axolotl/core/builders/base.py of axolotl 0.18)."""

    does = "runs the forward pass of bf16 weights under autocast"

    def applies(self, config: Config) -> bool:
        return config["precision"] == "bf16" and not has_own_mixed_precision(config)

    def plan(self, plan: BuildPlan) -> None:
        plan.autocast = plan.compute_dtype
