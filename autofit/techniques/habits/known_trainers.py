"""The trainers whose habits are known, each as its source says. Exports and readers of files go by the same versions.

The tests run transformers' and trl's. axolotl and LLaMA-Factory need other versions of their libraries than ours:
`make test-exports` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autofit.catalog.models import Model
from autofit.core.errors import unknown
from autofit.core.lattice import Config, Value
from autofit.techniques.axes.batching import separates_sequences
from autofit.techniques.axes.sharding import has_own_mixed_precision
from autofit.techniques.habits.habit import (
    AdaptersInBf16,
    AdaptersInFp32,
    GradientsBesideBuckets,
    Habit,
    InputGradients,
    LogitsInEvaluation,
    NormsAndEmbeddingsInFp32,
    TiledLoss,
    UnderAutocast,
    UpcastBeside4Bit,
)
from autofit.techniques.selective import BUDGETS, SAVE_ATTENTION


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """One trainer, as its named version is."""

    name: str
    version: str
    """Where its habits were read, and the keys of its files, such as `trl 1.16`."""
    habits: tuple[Habit, ...] = ()
    usual: Mapping[str, Value] = field(default_factory=dict)
    """Axis -> the value that stands for the plain recipe's, which the trainer cannot train."""
    nearest: Mapping[str, Mapping[Value, Value]] = field(default_factory=dict)
    """Axis -> value that the trainer lacks -> the one that it has in its place."""
    cannot: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Axis -> value -> what the trainer does instead, beginning with a verb."""
    cannot_with_adapters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """As `cannot`, for LoRA and QLoRA alone."""
    cannot_in_full: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """As `cannot`, for full training alone, unless DeepSpeed or FSDP decides the weights' formats."""

    cannot_keep_apart: Callable[[Config], str | None] = lambda config: None
    """What it does instead of keeping a config's packed sequences apart, beginning with a verb; None if it can."""
    liger_models: tuple[str, ...] = ()
    """Types of models to which it applies Liger's loss; empty where it is not asked for that."""
    has_one_liger_switch: bool = False
    """Whether Liger's loss and its kernels are turned on together, not each on its own."""

    @property
    def release(self) -> str:
        """The number of `version`."""
        return self.version.split()[1]

    def unsupported(self, config: Config) -> str | None:
        """Why the trainer trains something else than `config` says, in one sentence; None if it does not."""
        of_method = self.cannot_with_adapters
        if config["method"] == "full":
            of_method = {} if has_own_mixed_precision(config) else self.cannot_in_full
        for axis, values in (row for table in (self.cannot, of_method) for row in table.items()):
            instead = values.get(str(config.get(axis)))
            if instead is not None:
                return f"{axis}={config[axis]} is not possible with {self.name}, which {instead}"
        instead = self.cannot_keep_apart(config) if separates_sequences(config) else None
        return instead and f"batching=padding-free is not possible here with {self.name}, which {instead}"

    def leaves_liger_out(self, model: Model) -> bool:
        """Whether the trainer takes no notice, for this model, of being told to use Liger's loss."""
        return bool(self.liger_models) and model.config["model_type"] not in self.liger_models


LIGER_MODELS = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v4", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3_text"),
    *("gemma4_text", "glm4", "gpt_oss", "granite", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "llama4_text"),
    *("ministral", "mistral", "mixtral", "nemotron", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "smollm3"),
)
"""Those to which Liger applies its loss when it is asked (MODEL_TYPE_TO_APPLY_LIGER_FN of liger_kernel/transformers/
monkey_patch.py, 0.8.5), without those that also see images. For others it logs a line, and does nothing."""

TRANSFORMERS = Trainer(
    name="transformers",
    version="transformers 5.23 with peft 0.21",
    habits=(UpcastBeside4Bit(), AdaptersInFp32("lora"), InputGradients("qlora"), GradientsBesideBuckets()),
    liger_models=LIGER_MODELS,
)
"""`Trainer` with peft, as their guides use them."""

_NO_BUDGET = dict.fromkeys(BUDGETS, "sets no budget of torch's")
_NO_REPEATING = {"efficient": "leaves shared keys to torch's sdpa"}
_NO_TILES = {"tiled": "computes MLPs as a whole"}
_NO_EARLY_UPDATE = {"in-backward": "updates all weights after the backward pass"}

TRL = Trainer(
    name="trl",
    version="trl 1.16",
    habits=(
        *(AdaptersInFp32("lora"), AdaptersInBf16(), InputGradients("lora", "qlora"), TiledLoss()),
        GradientsBesideBuckets(),
    ),
    usual={"loss": "chunked"},
    nearest={"checkpointing": {"selective": SAVE_ATTENTION}},
    cannot={
        "loss": {"full": "always chunks the loss", "fused": "refuses Liger's fused loss"},
        "attention": _NO_REPEATING,
        "checkpointing": {"selective": "keeps the outputs of attention only", **_NO_BUDGET},
        "update": _NO_EARLY_UPDATE,
        "mlp": _NO_TILES,
    },
    cannot_with_adapters={"checkpointing": {SAVE_ATTENTION: "recomputes attention, too, in a model with adapters"}},
    cannot_keep_apart=lambda config: (
        "joins the rows of a micro-batch, under one mask without attention=flash"
        if config["attention"] != "flash" and config["micro_batch"] != 1
        else None
    ),
)
"""`SFTTrainer`."""

AXOLOTL = Trainer(
    name="axolotl",
    version="axolotl 0.19",
    # `load_adapter` of src/axolotl/loaders/adapter.py wants gradients of the inputs whether or not it checkpoints.
    # Adapters have the format that the exported `peft_autocast_adapter_dtype` says, and nothing else of a model with
    # adapters stays in fp32. The LoRA kernels, on by default, are off in what is exported.
    habits=(
        *(UnderAutocast(), NormsAndEmbeddingsInFp32(), InputGradients("lora", "qlora", always=True)),
        *(LogitsInEvaluation(), GradientsBesideBuckets()),
    ),
    nearest={"checkpointing": {"selective": SAVE_ATTENTION}},
    cannot={
        "checkpointing": {"selective": "keeps the outputs of attention only", **_NO_BUDGET},
        "loss": {"chunked": "chunks the loss alone and makes all logits at once"},
        "attention": _NO_REPEATING,
        "update": _NO_EARLY_UPDATE,
    },
    cannot_in_full={
        "precision": {
            "bf16-mixed": "loads the weights in bf16 and keeps none in fp32",
            "fp16-mixed": "loads the weights in fp16, for which torch refuses loss scaling",
        }
    },
    liger_models=LIGER_MODELS,
)

_ALL_LAYERS = dict.fromkeys(("every-2", "every-4", SAVE_ATTENTION, "selective"), "checkpoints all layers or none")

LLAMAFACTORY = Trainer(
    name="llamafactory",
    version="LLaMA-Factory 0.9.5",
    # `init_adapter` of src/llamafactory/model/adapter.py leaves the adapters of pure bf16 to peft, which has them in
    # fp32; every checkpointed layer's input gets a gradient: `get_custom_gradient_checkpointing_func` of
    # src/llamafactory/model/model_utils/checkpointing.py.
    habits=(
        *(AdaptersInFp32("lora", "qlora"), InputGradients("lora", "qlora"), LogitsInEvaluation()),
        GradientsBesideBuckets(),
    ),
    cannot={
        "checkpointing": {**_ALL_LAYERS, **_NO_BUDGET},
        "loss": {"chunked": "has no such loss and makes all logits at once"},
        "attention": _NO_REPEATING,
        "update": _NO_EARLY_UPDATE,
        "mlp": _NO_TILES,
    },
    cannot_with_adapters={
        "precision": dict.fromkeys(("tf32", "fp32"), "keeps frozen weights in the format of the checkpoint")
    },
    # `SFTDataCollatorWith4DAttentionMask` of src/llamafactory/data/collator.py ends at other batches.
    cannot_keep_apart=lambda config: (
        "takes one row at a time with attention=flash"
        if config["attention"] == "flash" and config["micro_batch"] != 1
        else None
    ),
    # `apply_liger_kernel` of src/llamafactory/model/model_utils/liger_kernel.py, without those that also see images,
    # and without granite, whose loss Liger leaves as it is unless it is asked.
    liger_models=(
        *("gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "llama", "mistral", "mixtral"),
        *("olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "gpt_oss"),
    ),
    has_one_liger_switch=True,
)

TRAINERS: Mapping[str, Trainer] = {trainer.name: trainer for trainer in (TRANSFORMERS, TRL, AXOLOTL, LLAMAFACTORY)}

_NO_TRAINER = Trainer(name="none", version="none")


def trainer_by_name(name: str | None) -> Trainer:
    """The trainer of this name; for None, one without habits that can train everything. Raises `UsageError`."""
    if name is not None and name not in TRAINERS:
        raise unknown("trainer", name, TRAINERS)
    return _NO_TRAINER if name is None else TRAINERS[name]
