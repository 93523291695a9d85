"""MLPs in tiles: what they compute, and how often."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofit.catalog.models import Model
from autofit.core.lattice import Value
from autofit.techniques.axes.kernels import MODEL_TYPES
from autofit.techniques.axes.mlp import tile_count
from autofit.training.decoder import decoder_layers
from autofit.training.step import TrainingStep
from tests.tiny import (
    GEMMA2,
    LLAMA,
    accumulate,
    attention_of,
    built,
    config,
    gradients,
    one_of_each_architecture,
    relative_error,
    rows,
    shrunk,
    stir_adapters,
)

SEQ_LEN = 160
"""Three tiles of a model that is 64 wide: 54, 54 and 52 tokens."""
SHRUNK = [model for name in one_of_each_architecture() if (model := shrunk(name)).config["model_type"] in MODEL_TYPES]


def steps(values: dict[str, Value], model: Model) -> tuple[TrainingStep, TrainingStep]:
    """The same step with its MLPs in tiles and as a whole."""
    made = []
    for mlp in ("tiled", "whole"):
        chosen = config(**{"precision": "fp32", "attention": attention_of(model), **values, "mlp": mlp})
        step = built(chosen, model, seq_len=SEQ_LEN)
        stir_adapters(step)
        made.append(step)
    return made[0], made[1]


def recorded(step: TrainingStep) -> list[int]:
    """The tokens of each call of the first layer's MLP from now on."""
    mlp: Any = decoder_layers(step.module.model)[0].mlp
    forward, calls = mlp.forward, []

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(hidden.numel() // hidden.shape[-1])
        result: torch.Tensor = forward(hidden)
        return result

    mlp.forward = counted
    return calls


@pytest.mark.parametrize(
    ("values", "model"),
    [
        *(({}, model) for model in SHRUNK),
        *(({"checkpointing": value}, LLAMA) for value in ("full", "every-2", "save-attention")),
        *(({"method": m, "checkpointing": "full", "micro_batch": 2}, LLAMA) for m in ("full", "lora", "qlora")),
        ({"method": "lora", "targets": "attention", "micro_batch": 4}, LLAMA),
        ({"method": "lora", "checkpointing": "full"}, GEMMA2),
    ],
    ids=lambda value: value.name if isinstance(value, Model) else ",".join(map(str, value.values())) or "plain",
)
def test_tiles_train_as_the_whole_does(values: dict[str, Value], model: Model) -> None:
    tiled, whole = steps(values, model)
    tokens = rows(seq_len=SEQ_LEN)
    calls = recorded(tiled)
    assert accumulate(tiled, tokens) == pytest.approx(accumulate(whole, tokens), rel=1e-6)
    assert relative_error(gradients(tiled), gradients(whole)) < 5e-6
    assert set(calls) == {54 * tiled.micro_batch, 52 * tiled.micro_batch}


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_tiles_are_computed_under_the_autocast_of_the_forward_pass(
    method: str, precision: str, checkpointing: str
) -> None:
    tiled, whole = steps({"method": method, "precision": precision, "checkpointing": checkpointing}, LLAMA)
    tokens = rows(seq_len=SEQ_LEN)
    assert accumulate(tiled, tokens) == pytest.approx(accumulate(whole, tokens), rel=6e-4)
    assert relative_error(gradients(tiled), gradients(whole)) < 3e-2


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_every_tile_is_computed_twice_even_in_a_layer_that_is_recomputed(checkpointing: str) -> None:
    tiled, _ = steps({"checkpointing": checkpointing, "micro_batch": 4}, LLAMA)
    calls = recorded(tiled)
    accumulate(tiled, rows(seq_len=SEQ_LEN))
    assert calls == [216, 216, 208] * 2


def test_evaluation_is_in_tiles_and_the_gradient_that_trials_are_compared_with_is_not() -> None:
    tiled, whole = steps({}, LLAMA)
    tokens, calls = rows(1, seq_len=SEQ_LEN), recorded(tiled)
    assert float(tiled.evaluate(tokens)) == pytest.approx(float(whole.evaluate(tokens)), rel=1e-6)
    assert calls == [54, 54, 52]
    assert tiled.plain_gradient_norm(tokens) == pytest.approx(whole.plain_gradient_norm(tokens), rel=1e-6)
    assert calls[3:] == [SEQ_LEN]


def test_a_shorter_sequence_has_tiles_of_its_own() -> None:
    tiled, _ = steps({"micro_batch": 2}, LLAMA)
    calls = recorded(tiled)
    tiled.evaluate(rows(2, seq_len=100))
    tiled.evaluate(rows(2, seq_len=64))
    assert calls == [100, 100, 128]


def test_a_tile_has_about_as_many_tokens_as_the_model_is_wide() -> None:
    assert [tile_count(seq_len, 4096) for seq_len in (4096, 4097, 32_768)] == [1, 2, 8]
