"""trl's `SFTTrainer`."""

from __future__ import annotations

from autofit.techniques.habits.habit import Trainer
from autofit.techniques.habits.input_gradients import InputGradients
from autofit.techniques.habits.tiled_loss import TiledLoss
from autofit.techniques.habits.weight_formats import AdaptersInBf16, AdaptersInFp32

TRL = Trainer(
    name="trl",
    version="trl 1.16",
    habits=(AdaptersInFp32("lora"), AdaptersInBf16(), InputGradients("lora", "qlora"), TiledLoss()),
    usual={"loss": "chunked"},
    cannot={
        "loss": {"full": "always chunks the loss", "fused": "refuses Liger's fused loss"},
        "checkpointing": {"selective": "keeps the outputs of attention only"},
    },
)
