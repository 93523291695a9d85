"""The habit of computing the loss tile by tile."""

from __future__ import annotations

from importlib import import_module

from autofit.techniques.habits.habit import Habit
from autofit.techniques.technique import BuildPlan


class TiledLoss(Habit):
    """The logits of 4,096 tokens and 32,768 words at a time, which the backward pass computes again:
    `add_fused_lm_head` of trl 1.16 (trl/trainer/utils.py)."""

    does = "computes the logits tile by tile, twice"

    def plan(self, plan: BuildPlan) -> None:
        from autofit.techniques.losses.tiled_cross_entropy import tiled_cross_entropy

        plan.loss = tiled_cross_entropy
        if plan.device.type == "cuda":  # all that trl's kernels import at their first use, which is timed
            import_module("trl.trainer.utils")
