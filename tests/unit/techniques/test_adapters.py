"""LoRA adapters: where they are, what they start from, and that nothing else is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from autofit.catalog.models import Model
from autofit.core.errors import UsageError
from autofit.techniques import adapters, unsupported
from autofit.techniques.adapters import alpha, attention_projections
from autofit.training.build import make_plan, make_skeleton
from autofit.training.step import TrainingStep
from tests.tiny import (
    CPU,
    GEMMA2,
    LLAMA,
    QWEN3_MOE,
    accumulate,
    attention_of,
    built,
    config,
    gradients,
    job,
    model,
    one_of_each_architecture,
    rows,
    shrunk,
)

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


def adapted(step: TrainingStep) -> dict[str, Any]:
    """The layers that have adapters, by their names inside the model."""
    return {n: m for n, m in step.module.named_modules() if isinstance(m, LoraLayer)}


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize(("targets", "names"), [("attention", ATTENTION), ("all-linear", ATTENTION | MLP)])
def test_targets_name_the_layers_that_get_adapters(method: str, targets: str, names: set[str]) -> None:
    layers = adapted(built(config(method=method, targets=targets)))
    assert {name.rsplit(".", 1)[-1] for name in layers} == names
    assert len(layers) == 3 * len(names)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        # peft wraps the stacked experts, twice, and the router, as it does in a user's trainer
        (QWEN3_MOE, ATTENTION | {"experts", "base_layer", "gate"}),
        (shrunk("phi-4"), {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        (GEMMA2, ATTENTION | MLP),
    ],
    ids=lambda value: value.name if isinstance(value, Model) else "",
)
def test_all_linear_means_every_linear_layer_but_the_head(model: Model, names: set[str]) -> None:
    layers = adapted(built(config(method="lora", attention=attention_of(model)), model))
    assert {name.rsplit(".", 1)[-1] for name in layers} == names


def test_stacked_experts_cannot_have_dropout_in_front_and_that_is_known_before() -> None:
    for targets, dropout, works in (("all-linear", 0.0, True), ("attention", 0.1, True), ("all-linear", 0.1, False)):
        requested = config(method="lora", targets=targets)
        reason = unsupported(requested, job(QWEN3_MOE, lora_dropout=dropout))
        assert (reason is None) is works
        if works:
            built(requested, QWEN3_MOE, lora_dropout=dropout)


@pytest.mark.parametrize(
    ("model", "names"), [(LLAMA, ["k_proj", "o_proj", "q_proj", "v_proj"]), (shrunk("phi-4"), ["o_proj", "qkv_proj"])]
)
def test_projections_of_attention_are_found_by_what_they_are_part_of(model: Model, names: list[str]) -> None:
    full = config(attention=attention_of(model))
    assert attention_projections(make_skeleton(make_plan(full, job(model), CPU))) == names


def test_a_model_without_attention_has_no_projections() -> None:
    with pytest.raises(UsageError, match="Sequential has no Linear layers in attention"):
        attention_projections(nn.Sequential(nn.Linear(2, 2)))


MAMBA = {
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 32},
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "falcon_mamba": {},
}


@pytest.mark.parametrize("kind", MAMBA)
def test_adapters_that_peft_refuses_are_refused_before_anything_runs(kind: str) -> None:
    mamba = model(kind, num_hidden_layers=2, **MAMBA[kind])
    requested = config(method="lora", attention="eager")
    reason = unsupported(requested, job(mamba))
    assert reason is not None and "\n" not in reason
    assert reason.startswith(f"targets=all-linear cannot work for tiny-{kind}: ")
    assert "incompatible with Mamba" in reason
    with pytest.raises(ValueError, match="incompatible with Mamba"):
        make_skeleton(make_plan(requested, job(mamba), CPU))
    assert unsupported(config(attention="eager"), job(mamba)) is None


def test_adapters_are_refused_by_their_targets() -> None:
    hybrid, alone = (model(kind, num_hidden_layers=2, **MAMBA[kind]) for kind in ("falcon_h1", "mamba"))
    requested = config(method="lora", attention="eager", targets="attention")
    assert unsupported(requested, job(hybrid)) is None
    assert {n.rsplit(".", 1)[-1] for n in adapted(built(requested, hybrid))} == ATTENTION
    assert "has no Linear layers in attention modules" in str(unsupported(requested, job(alone)))


@pytest.mark.parametrize("targets", ["attention", "all-linear"])
@pytest.mark.parametrize("name", one_of_each_architecture())
def test_peft_has_adapters_for_the_catalog(name: str, targets: str) -> None:
    assert adapters.unsupported(shrunk(name), targets, 0.0) is None


@pytest.mark.parametrize("rank", [1, 8, 128])
def test_the_rank_is_the_width_between_the_two_matrices(rank: int) -> None:
    for layer in adapted(built(config(method="lora", rank=rank))).values():
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert a.shape == (rank, layer.base_layer.in_features)
        assert b.shape == (layer.base_layer.out_features, rank)
        assert layer.scaling["default"] == alpha(rank) / rank == 2.0


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_start_with_a_random_and_b_zero(method: str) -> None:
    step = built(config(method=method))
    for layer in adapted(step).values():
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        # peft's Kaiming uniform with a = sqrt(5): bound 1 / sqrt(in_features)
        bound = layer.base_layer.in_features**-0.5
        assert float(a.detach().abs().max()) <= bound
        assert float(a.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.2)
        assert not b.detach().any()


def test_adapters_of_one_start_change_nothing() -> None:
    # A product with zero is added to each output.
    step = built(config(method="lora", precision="fp32", micro_batch=4))
    tokens = rows()
    with_adapters = accumulate(step, tokens)
    for layer in adapted(step).values():
        layer.enable_adapters(False)
    inputs, labels = next(step.split(tokens))
    without = float(step.engine.root(inputs, labels).detach()) / int((labels >= 0).sum())
    assert with_adapters == pytest.approx(without, rel=1e-6)


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize(
    ("precision", "trained", "frozen"),
    [
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("fp16-mixed", torch.float32, torch.float16),
        ("fp32", torch.float32, torch.float32),
    ],
)
def test_adapters_are_wide_in_mixed_precision_and_frozen_weights_are_not(
    method: str, precision: str, trained: torch.dtype, frozen: torch.dtype
) -> None:
    step = built(config(method=method, precision=precision))
    for name, parameter in step.module.named_parameters():
        is_adapter = ".lora_A." in name or ".lora_B." in name
        assert parameter.requires_grad is is_adapter
        packed = method == "qlora" and "base_layer" in name
        assert parameter.dtype is (trained if is_adapter else torch.uint8 if packed else frozen)


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", "fp16-mixed", "fp32"])
def test_only_adapters_get_gradients_and_they_have_the_weights_format(precision: str) -> None:
    step = built(config(method="lora", precision=precision, micro_batch=4))
    accumulate(step, rows())
    assert set(gradients(step)) == {n for n, _ in step.module.named_parameters() if ".lora_" in n}
    for parameter in step.module.parameters():
        assert parameter.grad is None or parameter.grad.dtype is parameter.dtype


def test_dropout_stands_in_front_of_each_adapter_only_where_it_is_asked_for() -> None:
    for probability in (0.0, 0.25):
        step = built(config(method="lora"), lora_dropout=probability)
        for layer in adapted(step).values():
            dropout = layer.lora_dropout["default"]
            if probability:
                assert isinstance(dropout, nn.Dropout) and dropout.p == probability
            else:
                assert isinstance(dropout, nn.Identity)
