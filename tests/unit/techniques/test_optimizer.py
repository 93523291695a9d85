"""Optimizers: the implementation behind every name, the format of its states, and that it learns."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from autofit.core.lattice import Config
from autofit.techniques.axes import optimizer as module
from autofit.techniques.technique import MAX_GRADIENT_NORM
from autofit.training.step import TrainingStep
from tests.tiny import LLAMA, LLAMA_TIED, accumulate, built, config, gradients, rows

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adafactor": Adafactor,
    "lion-8bit": bitsandbytes.optim.Lion8bit,
    "adamw-8bit": bitsandbytes.optim.AdamW8bit,
    "paged-adamw-8bit": bitsandbytes.optim.PagedAdamW8bit,
    "lion": bitsandbytes.optim.Lion,
    "adamw": torch.optim.AdamW,
    "adamw-foreach": torch.optim.AdamW,
}
# Paged states live on CUDA; elsewhere the class says so and goes on.
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")


def optimizer(step: TrainingStep) -> torch.optim.Optimizer:
    result: torch.optim.Optimizer = step.engine.optimizer  # type: ignore[attr-defined]
    return result


def states(step: TrainingStep) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of state that are as large as the parameter they belong to, by its name."""
    named = dict(step.module.named_parameters())
    held = optimizer(step).state
    return {
        name: {k: v for k, v in held[p].items() if isinstance(v, torch.Tensor) and v.numel() == p.numel()}
        for name, p in named.items()
        if p in held
    }


def trained(config: Config, model: Any = LLAMA) -> TrainingStep:
    """A step that was run once, so that its states exist."""
    step = built(config, model)
    step.run(rows())
    return step


def test_every_optimizer_of_the_axis_is_tested_here() -> None:
    assert set(CLASSES) == set(module.Optimizer.axis.values)


@pytest.mark.parametrize("name", CLASSES)
def test_each_name_makes_its_optimizer_for_all_that_is_trained(name: str) -> None:
    for method in ("full", "lora"):
        step = built(config(method=method, optimizer=name))
        made = optimizer(step)
        assert type(made) is CLASSES[name]
        held = {id(p) for group in made.param_groups for p in group["params"]}
        assert held == {id(p) for p in step.module.parameters() if p.requires_grad}
        assert all(group["lr"] == module.LEARNING_RATE for group in made.param_groups)
        assert all((group["weight_decay"] or 0.0) == module.weight_decay(name) for group in made.param_groups)


@pytest.mark.parametrize(
    ("name", "fused", "foreach"), [("sgd", True, False), ("adamw", True, False), ("adamw-foreach", False, True)]
)
def test_fused_is_the_rule_and_foreach_only_where_it_is_asked_for(name: str, fused: bool, foreach: bool) -> None:
    group = optimizer(built(config(optimizer=name))).param_groups[0]
    assert bool(group["fused"]) is fused
    assert bool(group["foreach"]) is foreach


def test_adafactor_keeps_factors_instead_of_moments() -> None:
    step = trained(config(optimizer="adafactor"))
    group = optimizer(step).param_groups[0]
    assert not group["relative_step"] and not group["scale_parameter"]
    assert group["beta1"] is None
    matrices = [state for p, state in optimizer(step).state.items() if p.dim() == 2]
    assert matrices
    assert all({"exp_avg_sq_row", "exp_avg_sq_col"} <= set(state) for state in matrices)
    assert not any("exp_avg" in state for state in matrices)


@pytest.mark.parametrize(
    ("name", "precision", "dtype", "per_parameter"),
    [
        ("sgd", "bf16-mixed", None, 0),
        ("adamw", "bf16-mixed", torch.float32, 2),
        ("adamw", "bf16", torch.bfloat16, 2),
        ("adamw-foreach", "bf16", torch.bfloat16, 2),
        ("lion", "bf16-mixed", torch.float32, 1),
        ("lion", "bf16", torch.float32, 1),
        ("lion-8bit", "bf16-mixed", torch.uint8, 1),
        ("adamw-8bit", "bf16", torch.uint8, 2),
        ("adamw-8bit", "fp32", torch.uint8, 2),
        ("paged-adamw-8bit", "bf16-mixed", torch.uint8, 2),
    ],
)
def test_states_have_the_format_that_the_name_promises(
    name: str, precision: str, dtype: torch.dtype | None, per_parameter: int
) -> None:
    held = states(trained(config(optimizer=name, precision=precision)))
    matrices = {n: s for n, s in held.items() if "mlp" in n}
    assert matrices or name == "sgd"
    for state in matrices.values():
        assert len(state) == per_parameter
        assert {tensor.dtype for tensor in state.values()} <= {dtype}


@pytest.mark.parametrize("name", ["lion-8bit", "adamw-8bit", "paged-adamw-8bit"])
@pytest.mark.parametrize("model", [LLAMA, LLAMA_TIED], ids=["untied", "tied"])
def test_states_of_embeddings_and_of_small_tensors_stay_wide(name: str, model: Any) -> None:
    step = trained(config(optimizer=name), model)
    held = states(step)
    wide = {n for n, s in held.items() if all(tensor.dtype is torch.float32 for tensor in s.values())}
    for tensor_name, parameter in step.module.named_parameters():
        # bitsandbytes leaves tensors below 4096 elements alone
        assert (tensor_name in wide) == ("embed_tokens" in tensor_name or parameter.numel() < 4096)
    assert any("lm_head" in n for n in held) == (model is LLAMA)


def test_one_build_leaves_nothing_behind_for_the_next() -> None:
    # The embedding is the first tensor of the first build, an adapter of 64 * 64 elements that of the second.
    trained(config(optimizer="adamw-8bit"))
    held = states(trained(config(method="lora", rank=64, optimizer="adamw-8bit")))
    assert {t.dtype for n, s in held.items() if "q_proj.lora_A" in n for t in s.values()} == {torch.uint8}


def test_one_build_keeps_no_memory_of_the_one_before_it_alive() -> None:
    step = trained(config(optimizer="adamw-8bit"))
    weight = weakref.ref(step.module.head().weight)
    embedding = weakref.ref(step.module.model.get_input_embeddings().weight)  # type: ignore[operator]
    del step
    gc.collect()
    assert weight() is None
    assert embedding() is None


@pytest.mark.parametrize(
    ("method", "name"), [*((method, name) for method in ("full", "lora") for name in CLASSES), ("qlora", "adamw-8bit")]
)
def test_every_optimizer_learns_one_batch(monkeypatch: pytest.MonkeyPatch, method: str, name: str) -> None:
    rates = {"sgd": 1.0, "lion": 1e-3, "lion-8bit": 1e-3}
    monkeypatch.setattr(module, "LEARNING_RATE", rates.get(name, 3e-3))
    step = built(config(method=method, optimizer=name, micro_batch=4))
    tokens = rows()
    losses = [float(step.run(tokens)) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.05


def test_frozen_weights_do_not_move() -> None:
    step = built(config(method="lora", optimizer="adamw"))
    frozen = {n: p.detach().clone() for n, p in step.module.named_parameters() if not p.requires_grad}
    assert frozen
    for _ in range(2):
        step.run(rows())
    assert all(torch.equal(p, frozen[n]) for n, p in step.module.named_parameters() if n in frozen)


@pytest.mark.parametrize(("factor", "norm_moved"), [(1e6, MAX_GRADIENT_NORM), (None, 0.25)])
def test_gradients_are_clipped_to_norm_one_and_never_scaled_up(
    monkeypatch: pytest.MonkeyPatch, factor: float | None, norm_moved: float
) -> None:
    monkeypatch.setattr(module, "LEARNING_RATE", 1.0)
    step = built(config(optimizer="sgd", precision="fp32", micro_batch=4))
    before = {n: p.detach().clone() for n, p in step.module.named_parameters()}
    accumulate(step, rows())
    result = list(gradients(step).values())
    norm = float(torch.stack([g.norm() for g in result]).norm())
    with torch.no_grad():
        for parameter in step.module.parameters():
            assert parameter.grad is not None
            parameter.grad *= norm_moved / norm if factor is None else factor
    step.update()
    moved = torch.stack([(p.detach() - before[n]).norm() for n, p in step.module.named_parameters()])
    assert float(moved.norm()) == pytest.approx(norm_moved, rel=1e-4)


def test_an_update_frees_the_gradients() -> None:
    step = trained(config())
    assert all(p.grad is None for p in step.module.parameters())


def test_an_overflow_under_loss_scaling_skips_the_update_and_lowers_the_scale() -> None:
    step = built(config(precision="fp16-mixed", micro_batch=4))
    scaler: torch.amp.GradScaler = step.engine._scaler  # type: ignore[attr-defined]
    before = {n: p.detach().clone() for n, p in step.module.named_parameters()}
    scale = scaler.get_scale()
    accumulate(step, rows())
    head: nn.Parameter = step.module.head().weight  # type: ignore[assignment]
    assert head.grad is not None
    head.grad[0, 0] = float("inf")
    step.update()
    assert scaler.get_scale() == scale / 2
    assert all(torch.equal(p, before[n]) for n, p in step.module.named_parameters())
    accumulate(step, rows())
    step.update()
    assert not all(torch.equal(p, before[n]) for n, p in step.module.named_parameters())
