"""transformers' Trainer with peft, as their guides use them."""

from __future__ import annotations

from autofit.techniques.trainers.input_gradients import InputGradients
from autofit.techniques.trainers.trainer import Trainer
from autofit.techniques.trainers.weight_formats import AdaptersInFp32, UpcastBeside4Bit

TRANSFORMERS = Trainer(
    name="transformers",
    version="transformers 5.23 with peft 0.21",
    habits=(UpcastBeside4Bit(), AdaptersInFp32(), InputGradients("qlora")),
)
