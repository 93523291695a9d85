"""Who computes what lies between a decoder layer's matrix products."""

from __future__ import annotations

from typing import Any

from autofit.core.lattice import Axis, Config, chain
from autofit.techniques.axes.compilation import why_not_compiled
from autofit.techniques.job import Job
from autofit.techniques.technique import BuildPlan, Part, Technique

MODEL_TYPES = frozenset({"gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3"})
"""Dense architectures that Liger's kernels are for (MODEL_TYPE_TO_APPLY_LIGER_FN of
liger_kernel/transformers/monkey_patch.py, 0.8.5) and that every trainer applies them to. Of the others that it names,
no estimate says what they take."""
DENSE = "dense Gemma 2 and 3, Llama, Mistral, Phi 3 and 4, Qwen 2, 2.5 and 3, SmolLM 1 and 2"
"""Models of these architectures, in words."""


def by_liger(config: Config) -> bool:
    """Whether Liger's kernels are in the decoder layers."""
    return config.get("kernels") == "liger"


class Kernels(Technique):
    """A kernel of Liger's keeps less for the backward pass (Hsu et al. 2024). The loss has an axis of its own."""

    axis = Axis(
        name="kernels",
        values=("liger", "torch"),
        recipe="torch",
        leaves_out_recipe=True,
        lighter=chain("liger", "torch"),
        does="Who computes the norms, rotary embeddings and the MLP's gate in each decoder layer.",
        meanings={
            "liger": "Liger's kernels; GPUs, needs liger-kernel and a C compiler",
            "torch": "the operations of transformers' own code",
        },
        where=DENSE,
    )
    parts = frozenset({Part.DECODER, Part.EVALUATION})

    def unsupported(self, config: Config, job: Job) -> str | None:
        if not by_liger(config):
            return None
        if job.hardware.kind != "cuda":
            return "kernels=liger needs an NVIDIA or AMD GPU: use torch"
        if job.stack.liger_kernel is None:
            return "kernels=liger needs the liger-kernel package, which is not installed here"
        if job.model.config["model_type"] not in MODEL_TYPES:
            return f"kernels=liger is not known to work for {job.model.name}: use torch"
        if config["checkpointing"] == "selective" and config["method"] == "full":
            # Rotary embeddings are written over the projections that it keeps, which would then be rotated twice.
            return "kernels=liger computes wrong gradients with checkpointing=selective: use kernels=torch"
        return why_not_compiled("kernels=liger", job.hardware)

    def on_model(self, plan: BuildPlan, model: Any) -> None:
        if by_liger(plan.config) and plan.device.type != "cpu":  # an estimate has stand-ins of its own
            from autofit.techniques.liger_layers import LigerLayers

            plan.without_kernels = LigerLayers(model).plainly
