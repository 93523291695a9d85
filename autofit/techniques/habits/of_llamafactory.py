"""LLaMA-Factory, as its source says: no test here runs it, since it needs other versions of its libraries than ours."""

from __future__ import annotations

from autofit.techniques.habits.habit import Trainer
from autofit.techniques.habits.input_gradients import InputGradients
from autofit.techniques.habits.weight_formats import AdaptersInFp32

_ALL_LAYERS = "checkpoints all layers or none"

LLAMAFACTORY = Trainer(
    name="llamafactory",
    version="LLaMA-Factory 0.9.5",
    # `init_adapter` of src/llamafactory/model/adapter.py leaves the adapters of pure bf16 to peft, which has them in
    # fp32; every checkpointed layer's input gets a gradient: `get_custom_gradient_checkpointing_func` of
    # src/llamafactory/model/model_utils/checkpointing.py.
    habits=(AdaptersInFp32("lora", "qlora"), InputGradients("lora", "qlora")),
    cannot={
        "checkpointing": {"every-2": _ALL_LAYERS, "every-4": _ALL_LAYERS, "selective": _ALL_LAYERS},
        "loss": {"chunked": "has no such loss and makes all logits at once"},
    },
    cannot_with_adapters={"precision": {"fp32": "keeps frozen weights in the format of the checkpoint"}},
)
