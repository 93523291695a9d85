"""Habits of the step itself: what runs under autocast, how the loss is computed, which gradients are."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from autofit.core.lattice import Config
from autofit.techniques.axes.checkpointing import interval
from autofit.techniques.axes.sharding import has_own_mixed_precision
from autofit.techniques.habits.habit import Habit
from autofit.techniques.technique import BuildPlan


class UnderAutocast(Habit):
    """Products of bf16 weights run under autocast too, which then computes norms and losses of bf16 states in fp32:
    `bf16: true` reaches transformers' Trainer as `bf16` (src/axolotl/core/builders/base.py of axolotl)."""

    does = "runs the forward pass of bf16 weights under autocast"

    def applies(self, config: Config) -> bool:
        return config["precision"] == "bf16" and not has_own_mixed_precision(config)

    def plan(self, plan: BuildPlan) -> None:
        plan.autocast = plan.compute_dtype


class TiledLoss(Habit):
    """The logits of 4,096 tokens and 32,768 words at a time, which the backward pass computes again:
    `add_fused_lm_head` of trl 1.16 (trl/trainer/utils.py)."""

    does = "computes the logits tile by tile, twice"

    def plan(self, plan: BuildPlan) -> None:
        from autofit.techniques.losses.tiled_cross_entropy import tiled_cross_entropy

        plan.loss = tiled_cross_entropy
        if plan.device.type == "cuda":  # all that trl's kernels import at their first use, which is timed
            import_module("trl.trainer.utils")


class InputGradients(Habit):
    """With checkpointing, or `always`, the embeddings' output gets a gradient although nothing below is trained.

    `enable_input_require_grads` of transformers 5.23 (modeling_utils.py), which Trainer's heirs call since reentrant
    checkpointing needs it: `SFTTrainer.__init__` of trl 1.16, `prepare_model_for_kbit_training` of peft 0.21.
    """

    does = "computes the gradient of the embeddings' output, which nothing needs"

    def __init__(self, *methods: str, always: bool = False) -> None:
        """A habit with configs of these methods."""
        self._methods, self._always = methods, always

    def applies(self, config: Config) -> bool:
        return config["method"] in self._methods and (self._always or interval(config) > 0)

    def on_model(self, plan: BuildPlan, model: Any) -> None:
        model.get_base_model().enable_input_require_grads()


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
