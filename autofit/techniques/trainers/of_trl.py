"""trl's `SFTTrainer`."""

from __future__ import annotations

from autofit.techniques.trainers.input_gradients import InputGradients
from autofit.techniques.trainers.tiled_loss import TiledLoss
from autofit.techniques.trainers.trainer import Trainer
from autofit.techniques.trainers.weight_formats import AdaptersInBf16, AdaptersInFp32

TRL = Trainer(
    name="trl",
    version="trl 1.16",
    habits=(AdaptersInFp32(), AdaptersInBf16(), InputGradients("lora", "qlora"), TiledLoss()),
    usual={"loss": "chunked"},
    cannot={
        "loss": {"full": "always chunks the loss", "fused": "refuses Liger's fused loss"},
        "checkpointing": {"selective": "keeps the outputs of attention only"},
    },
)
