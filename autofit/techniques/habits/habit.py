"""What a trainer adds to a config's step without being asked. Each habit names the source that it was read in."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from autofit.core.lattice import Config
from autofit.techniques.axes.sharding import has_own_mixed_precision
from autofit.techniques.selective import interval
from autofit.techniques.technique import BuildPart, BuildPlan


class Habit(BuildPart):
    """Something that a trainer adds to a config's step without being asked, by the stages of a build."""

    def applies(self, config: Config) -> bool:
        """Whether the trainer does so with this config."""
        return True


class UnderAutocast(Habit):
    """Products of bf16 weights run under autocast too, which then computes norms and losses of bf16 states in fp32:
    `bf16: true` reaches transformers' Trainer as `bf16` (src/axolotl/core/builders/base.py of axolotl)."""

    def applies(self, config: Config) -> bool:
        return config["precision"] == "bf16" and not has_own_mixed_precision(config)

    def plan(self, plan: BuildPlan) -> None:
        plan.autocast = plan.compute_dtype


class TiledLoss(Habit):
    """The logits of 4,096 tokens and 32,768 words at a time, which the backward pass computes again:
    `add_fused_lm_head` of trl 1.16 (trl/trainer/utils.py)."""

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

    def __init__(self, *methods: str, always: bool = False) -> None:
        self._methods, self._always = methods, always

    def applies(self, config: Config) -> bool:
        return config["method"] in self._methods and (self._always or interval(config) > 0)

    def on_model(self, plan: BuildPlan, model: Any) -> None:
        model.get_base_model().enable_input_require_grads()


class GradientsBesideBuckets(Habit):
    """DDP's buckets are copies of the gradients: `gradient_as_bucket_view` is off in accelerate 1.15
    (`DistributedDataParallelKwargs` of utils/dataclasses.py), and transformers' Trainer leaves it so
    (`_build_accelerator_args` of trainer.py, 5.23)."""

    def applies(self, config: Config) -> bool:
        return config["sharding"] == "ddp"

    def plan(self, plan: BuildPlan) -> None:
        plan.bucket_views = False


class LogitsInEvaluation(Habit):
    """Unless it is told otherwise, Liger fuses the loss in training alone (`skip_logits` of liger_kernel/transformers/
    model/llama.py). transformers' Trainer tells it (`prediction_step` of trainer.py, 5.23) where Liger is its own
    option; where a plugin or a patch applies Liger, nobody does."""

    def applies(self, config: Config) -> bool:
        return config.get("loss") == "fused"

    def plan(self, plan: BuildPlan) -> None:
        from autofit.techniques.losses.cross_entropy import full_cross_entropy

        plan.evaluated_loss = full_cross_entropy


class WeightFormat(Habit):
    """A number format of the trained weights that is not the config's. It is lost where DeepSpeed or FSDP converts all
    weights itself."""

    trained: str | None
    """Torch's name for it; None where only some of the weights have it."""
    methods: tuple[str, ...]
    precisions: tuple[str, ...] | None = None
    """The precisions with which the trainer uses it; None for all."""

    def applies(self, config: Config) -> bool:
        if has_own_mixed_precision(config) or config["method"] not in self.methods:
            return False
        return self.precisions is None or config["precision"] in self.precisions

    def plan(self, plan: BuildPlan) -> None:
        import torch

        if self.trained is not None:
            plan.trained_dtype = getattr(torch, self.trained)


class UpcastBeside4Bit(WeightFormat):
    """All that stays in 16 bits beside a 4-bit base becomes fp32: norms, embeddings, head, and then the adapters.

    `prepare_model_for_kbit_training` of peft 0.21 (peft/utils/other.py), which the libraries' guides call before the
    adapters are added; `cast_adapter_dtype` of peft/tuners/tuners_utils.py has those in fp32 as well. Hidden states are
    then fp32 all the way, since a 4-bit layer answers in the format that it is given.
    """

    trained, methods = "float32", ("qlora",)

    def on_skeleton(self, plan: BuildPlan, model: Any) -> Any:
        import torch

        for module in model.modules():
            for name, parameter in module._parameters.items():
                is_packed = name == "weight" and type(module).__name__ == "Linear4bit"
                if parameter is not None and not is_packed and parameter.dtype in (torch.bfloat16, torch.float16):
                    parameter.data = parameter.data.to(torch.float32)
        return model


class AdaptersInFp32(WeightFormat):
    """Adapters are fp32 although all else is bf16, without autocast: `cast_adapter_dtype` of peft 0.21
    (peft/tuners/tuners_utils.py), unless told otherwise."""

    trained, precisions = "float32", ("bf16",)

    def __init__(self, *methods: str) -> None:
        self.methods = methods


class AdaptersInBf16(WeightFormat):
    """Adapters of a 4-bit base are bf16: `SFTTrainer.__init__` of trl 1.16 (trl/trainer/sft_trainer.py)."""

    trained, methods = "bfloat16", ("qlora",)


WIDENED = ("embed_tokens", "embed_in", "lm_head", "embed_out", "gate")
"""Modules that axolotl widens beside the norms: embeddings, heads, and the routers of experts."""


class NormsAndEmbeddingsInFp32(WeightFormat):
    """Norms, embeddings, head and routers are fp32 in full training with bf16 weights, unless flash attention wants all
    in one format: `_configure_embedding_dtypes` of axolotl (src/axolotl/loaders/model.py). Hidden states are then
    fp32 between the products, which autocast narrows."""

    trained, methods, precisions = None, ("full",), ("bf16",)

    def applies(self, config: Config) -> bool:
        return WeightFormat.applies(self, config) and config["attention"] != "flash"

    def on_skeleton(self, plan: BuildPlan, model: Any) -> Any:
        import torch

        for name, module in model.named_modules():
            if "norm" in name or name.rpartition(".")[2] in WIDENED:
                module.to(torch.float32)
        return model
