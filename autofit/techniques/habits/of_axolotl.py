"""axolotl, as its source says: no test here runs it, since it needs other versions of its libraries than ours."""

from __future__ import annotations

from autofit.techniques.habits.habit import Trainer
from autofit.techniques.habits.input_gradients import InputGradients
from autofit.techniques.habits.under_autocast import UnderAutocast
from autofit.techniques.habits.weight_formats import NormsAndEmbeddingsInFp32

AXOLOTL = Trainer(
    name="axolotl",
    version="axolotl 0.18",
    # `load_adapter` of src/axolotl/loaders/adapter.py wants gradients of the inputs whether or not it checkpoints.
    # Adapters have the format that the exported `peft_autocast_adapter_dtype` says, and nothing else of a model with
    # adapters stays in fp32. The LoRA kernels, on by default, are off in what is exported.
    habits=(UnderAutocast(), NormsAndEmbeddingsInFp32(), InputGradients("lora", "qlora", always=True)),
    cannot={
        "checkpointing": {"selective": "keeps the outputs of attention only"},
        "loss": {"chunked": "chunks the loss alone and makes all logits at once"},
    },
    cannot_in_full={
        "precision": {
            "bf16-mixed": "loads the weights in bf16 and keeps none in fp32",
            "fp16-mixed": "loads the weights in fp16, for which torch refuses loss scaling",
        }
    },
)
