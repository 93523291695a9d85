"""The habit of making all logits in evaluation, though Liger's loss makes none in training."""

from __future__ import annotations

from autofit.core.lattice import Config
from autofit.techniques.habits.habit import Habit
from autofit.techniques.technique import BuildPlan


class LogitsInEvaluation(Habit):
    """Unless it is told otherwise, Liger fuses the loss in training alone (`skip_logits` of liger_kernel/transformers/
    model/llama.py). transformers' Trainer tells it (`prediction_step` of trainer.py, 5.23) where Liger is its own
    option; where a plugin or a patch applies Liger, nobody does."""

    does = "makes all logits in evaluation, though Liger's loss makes none in training"

    def applies(self, config: Config) -> bool:
        return config.get("loss") == "fused"

    def plan(self, plan: BuildPlan) -> None:
        from autofit.techniques.losses.cross_entropy import full_cross_entropy

        plan.evaluated_loss = full_cross_entropy
