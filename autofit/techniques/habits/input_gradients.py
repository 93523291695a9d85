"""The habit of computing gradients as far down as the embeddings' output."""

from __future__ import annotations

from typing import Any

from autofit.core.lattice import Config
from autofit.techniques.habits.habit import Habit
from autofit.techniques.technique import BuildPlan


class InputGradients(Habit):
    """With checkpointing, or `always`, the embeddings' output gets a gradient although nothing below is trained.

    `enable_input_require_grads` of transformers 5.23 (modeling_utils.py), which Trainer's heirs call since reentrant
    checkpointing needs it: `SFTTrainer.__init__` of trl 1.16, `prepare_model_for_kbit_training` of peft 0.21.
    """

    does = "computes the gradient of the embeddings' output, which nothing needs"

    def __init__(self, *methods: str, always: bool = False) -> None:
        """Of configs with these methods."""
        self._methods, self._always = methods, always

    def applies(self, config: Config) -> bool:
        return config["method"] in self._methods and (self._always or config["checkpointing"] != "none")

    def on_model(self, plan: BuildPlan, model: Any) -> None:
        model.get_base_model().enable_input_require_grads()
