"""transformers' Trainer with peft, as their guides use them."""

from __future__ import annotations

from autofit.techniques.habits.habit import Trainer
from autofit.techniques.habits.input_gradients import InputGradients
from autofit.techniques.habits.weight_formats import AdaptersInFp32, UpcastBeside4Bit

TRANSFORMERS = Trainer(
    name="transformers",
    version="transformers 5.23 with peft 0.21",
    habits=(UpcastBeside4Bit(), AdaptersInFp32("lora"), InputGradients("qlora")),
)
