"""The trainers whose habits are known, each as its source says. Exports and readers of files go by the same versions.

The tests run transformers' and trl's; axolotl and LLaMA-Factory need other versions of their libraries than ours.
"""

from __future__ import annotations

from collections.abc import Mapping

from autofit.techniques.axes.checkpointing import BUDGETS
from autofit.techniques.habits.habit import Trainer
from autofit.techniques.habits.of_the_step import (
    InputGradients,
    LogitsInEvaluation,
    TiledLoss,
    UnderAutocast,
)
from autofit.techniques.habits.weight_formats import (
    AdaptersInBf16,
    AdaptersInFp32,
    NormsAndEmbeddingsInFp32,
    UpcastBeside4Bit,
)
from autofit.techniques.selective import SAVE_ATTENTION

TRANSFORMERS = Trainer(
    name="transformers",
    version="transformers 5.23 with peft 0.21",
    habits=(UpcastBeside4Bit(), AdaptersInFp32("lora"), InputGradients("qlora")),
)
"""`Trainer` with peft, as their guides use them."""

_NO_BUDGET = dict.fromkeys(BUDGETS, "sets no budget of torch's")
_NO_REPEATING = {"efficient": "leaves shared keys to torch's sdpa"}

TRL = Trainer(
    name="trl",
    version="trl 1.16",
    habits=(AdaptersInFp32("lora"), AdaptersInBf16(), InputGradients("lora", "qlora"), TiledLoss()),
    usual={"loss": "chunked"},
    nearest={"checkpointing": {"selective": SAVE_ATTENTION}},
    cannot={
        "loss": {"full": "always chunks the loss", "fused": "refuses Liger's fused loss"},
        "attention": _NO_REPEATING,
        "checkpointing": {"selective": "keeps the outputs of attention only", **_NO_BUDGET},
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
        LogitsInEvaluation(),
    ),
    nearest={"checkpointing": {"selective": SAVE_ATTENTION}},
    cannot={
        "checkpointing": {"selective": "keeps the outputs of attention only", **_NO_BUDGET},
        "loss": {"chunked": "chunks the loss alone and makes all logits at once"},
        "attention": _NO_REPEATING,
    },
    cannot_in_full={
        "precision": {
            "bf16-mixed": "loads the weights in bf16 and keeps none in fp32",
            "fp16-mixed": "loads the weights in fp16, for which torch refuses loss scaling",
        }
    },
)

_ALL_LAYERS = dict.fromkeys(("every-2", "every-4", SAVE_ATTENTION, "selective"), "checkpoints all layers or none")

LLAMAFACTORY = Trainer(
    name="llamafactory",
    version="LLaMA-Factory 0.9.5",
    # `init_adapter` of src/llamafactory/model/adapter.py leaves the adapters of pure bf16 to peft, which has them in
    # fp32; every checkpointed layer's input gets a gradient: `get_custom_gradient_checkpointing_func` of
    # src/llamafactory/model/model_utils/checkpointing.py.
    habits=(AdaptersInFp32("lora", "qlora"), InputGradients("lora", "qlora"), LogitsInEvaluation()),
    cannot={
        "checkpointing": {**_ALL_LAYERS, **_NO_BUDGET},
        "loss": {"chunked": "has no such loss and makes all logits at once"},
        "attention": _NO_REPEATING,
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
    liger_is_one=True,
)

TRAINERS: Mapping[str, Trainer] = {trainer.name: trainer for trainer in (TRANSFORMERS, TRL, AXOLOTL, LLAMAFACTORY)}
