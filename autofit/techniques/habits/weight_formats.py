"""Habits that change the number format of weights."""

from __future__ import annotations

from typing import Any

from autofit.core.lattice import Config
from autofit.techniques.axes.sharding import has_own_mixed_precision
from autofit.techniques.habits.habit import Habit
from autofit.techniques.technique import BuildPlan


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

    does = "keeps norms, embeddings, head and adapters of a 4-bit base in fp32"
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

    does = "trains the adapters of a bf16 base in fp32"
    trained, precisions = "float32", ("bf16",)

    def __init__(self, *methods: str) -> None:
        """A habit with configs of these methods."""
        self.methods = methods


class AdaptersInBf16(WeightFormat):
    """Adapters of a 4-bit base are bf16: `SFTTrainer.__init__` of trl 1.16 (trl/trainer/sft_trainer.py)."""

    does = "trains the adapters of a 4-bit base in bf16"
    trained, methods = "bfloat16", ("qlora",)


WIDENED = ("embed_tokens", "embed_in", "lm_head", "embed_out", "gate")
"""Modules that axolotl widens beside the norms: embeddings, heads, and the routers of experts."""


class NormsAndEmbeddingsInFp32(WeightFormat):
    """Norms, embeddings, head and routers are fp32 in full training with bf16 weights, unless flash attention wants all
    in one format: `_configure_embedding_dtypes` of axolotl (src/axolotl/loaders/model.py). Hidden states are then
    fp32 between the products, which autocast narrows."""

    does = "keeps norms, embeddings and head in fp32 beside bf16 weights"
    trained, methods, precisions = None, ("full",), ("bf16",)

    def applies(self, config: Config) -> bool:
        return WeightFormat.applies(self, config) and config["attention"] != "flash"

    def on_skeleton(self, plan: BuildPlan, model: Any) -> Any:
        import torch

        for name, module in model.named_modules():
            if "norm" in name or name.rpartition(".")[2] in WIDENED:
                module.to(torch.float32)
        return model
