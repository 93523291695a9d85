"""The trainers whose habits are known, each as its source says. Exports and readers of files go by the same versions.

The tests run transformers' and trl's. axolotl and LLaMA-Factory need other versions of their libraries than ours:
`make test-exports` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

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
from autofit.techniques.selective import BUDGETS, SAVE_ATTENTION, SELECTIVE


class Instead(NamedTuple):
    """What a trainer does instead of what a config says."""

    does: str
    """Beginning with a verb."""
    effect: Literal["more", "less", "near", "differs"] | None = "differs"
    """What that means for an export: more memory than was measured; less, and more recomputation; another
    implementation of the same; or something else. None where that depends on other axes: the export says it."""


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
    cannot: Mapping[str, Mapping[str, Instead]] = field(default_factory=dict)
    """Axis -> value -> what the trainer does instead."""
    cannot_with_adapters: Mapping[str, Mapping[str, Instead]] = field(default_factory=dict)
    """As `cannot`, for LoRA and QLoRA alone."""
    cannot_in_full: Mapping[str, Mapping[str, Instead]] = field(default_factory=dict)
    """As `cannot`, for full training alone, unless DeepSpeed or FSDP decides the weights' formats."""

    cannot_keep_apart: Callable[[Config], Instead | None] = lambda config: None
    """What it does instead of keeping a config's packed sequences apart; None if it can."""
    liger_models: tuple[str, ...] = ()
    """Types of models to which it applies Liger's loss; empty where it is not asked for that."""
    has_one_liger_switch: bool = False
    """Whether Liger's loss and its kernels are turned on together, not each on its own."""

    @property
    def release(self) -> str:
        """The number of `version`."""
        return self.version.split()[1]

    @property
    def title(self) -> str:
        """Its name as it writes it."""
        return self.version.split()[0]

    def instead(self, config: Config) -> dict[str, Instead]:
        """What the trainer does otherwise than `config` says, by the axis that says it."""
        of_method = self.cannot_with_adapters
        if config.get("method") == "full":
            is_whole = "sharding" in config and "offload" in config  # a stored config may lack them
            of_method = {} if is_whole and has_own_mixed_precision(config) else self.cannot_in_full
        rows = (row for table in (self.cannot, of_method) for row in table.items())
        found = {axis: instead for axis, values in rows if (instead := values.get(str(config.get(axis)))) is not None}
        apart = self.cannot_keep_apart(config) if separates_sequences(config) else None
        return found if apart is None else {**found, "batching": apart}

    def unsupported(self, config: Config) -> str | None:
        """Why the trainer trains something else than `config` says, in one sentence; None if it does not."""
        for axis, instead in self.instead(config).items():
            here = " here" if axis == "batching" else ""  # other axes decide that, too
            return f"{axis}={config[axis]} is not possible{here} with {self.name}, which {instead.does}"
        return None

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

_NO_BUDGET = dict.fromkeys(BUDGETS, Instead("sets no budget of torch's, and recomputes nothing", "more"))
_NO_REPEATING = {"efficient": Instead("leaves shared keys to torch's sdpa", "more")}
_NO_TILES = {"tiled": Instead("computes MLPs as a whole", "more")}
_NO_EARLY_UPDATE = {"in-backward": Instead("updates all weights after the backward pass, and clips", "more")}
_ATTENTION_ALONE = Instead("keeps the outputs of attention only", "less")

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
        "loss": {
            "full": Instead("always chunks the loss", "near"),
            "fused": Instead("refuses Liger's fused loss, and chunks the loss", "near"),
        },
        "attention": _NO_REPEATING,
        "checkpointing": {"selective": _ATTENTION_ALONE, **_NO_BUDGET},
        "update": _NO_EARLY_UPDATE,
        "mlp": _NO_TILES,
    },
    cannot_with_adapters={
        "checkpointing": dict.fromkeys(SELECTIVE, Instead("recomputes attention, too, in a model with adapters"))
    },
    cannot_keep_apart=lambda config: (
        Instead("joins the rows of a micro-batch, under one mask without attention=flash", "more")
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
        "checkpointing": {"selective": _ATTENTION_ALONE, **_NO_BUDGET},
        "loss": {"chunked": Instead("chunks the loss alone and makes all logits at once", "more")},
        "attention": _NO_REPEATING,
        "update": _NO_EARLY_UPDATE,
    },
    cannot_in_full={
        "precision": {
            "bf16-mixed": Instead("loads the weights in bf16 and keeps none in fp32: less memory and other rounding"),
            "fp16-mixed": Instead("loads the weights in fp16, for which torch refuses loss scaling"),
        }
    },
    liger_models=LIGER_MODELS,
)

_ALL_LAYERS = dict.fromkeys(
    ("every-2", "every-4", SAVE_ATTENTION, "selective"), Instead("checkpoints all layers or none", "less")
)

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
        "loss": {"chunked": Instead("has no such loss and makes all logits at once", None)},
        "attention": _NO_REPEATING,
        "update": _NO_EARLY_UPDATE,
        "mlp": _NO_TILES,
    },
    cannot_with_adapters={
        "precision": dict.fromkeys(("tf32", "fp32"), Instead("keeps frozen weights in the format of the checkpoint"))
    },
    # `SFTDataCollatorWith4DAttentionMask` of src/llamafactory/data/collator.py ends at other batches.
    cannot_keep_apart=lambda config: (
        Instead("takes one row at a time with attention=flash")
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
