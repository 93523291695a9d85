"""From a config to a step: what is decided before anything is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofit.techniques.axes.optimizer import FACTORIES
from autofit.techniques.losses import cross_entropy
from autofit.techniques.technique import BuildPlan
from autofit.training.build import make_plan, make_skeleton
from autofit.training.engines.local import LocalEngine
from autofit.training.weights import unwrap
from tests.tiny import CPU, LLAMA, built, config, job, plan


@pytest.mark.parametrize(
    ("precision", "trained", "compute", "autocast", "scaling"),
    [
        ("bf16", torch.bfloat16, torch.bfloat16, False, False),
        ("bf16-mixed", torch.float32, torch.bfloat16, True, False),
        ("fp16-mixed", torch.float32, torch.float16, True, True),
        ("fp32", torch.float32, torch.float32, False, False),
    ],
)
def test_precision_decides_formats(
    precision: str, trained: torch.dtype, compute: torch.dtype, autocast: bool, scaling: bool
) -> None:
    made = plan(config(precision=precision))
    assert (made.trained_dtype, made.compute_dtype) == (trained, compute)
    assert (made.autocast, made.loss_scaling) == (autocast, scaling)


def test_every_axis_leaves_its_decision_in_the_plan() -> None:
    asked = config(
        method="lora", rank=32, targets="attention", micro_batch=2, attention="eager", loss="chunked", optimizer="sgd"
    )
    made = make_plan(asked.replace(compile=True), job(LLAMA, lora_dropout=0.1), CPU)
    assert made == BuildPlan(
        device=CPU,
        trained_dtype=torch.float32,
        compute_dtype=torch.bfloat16,
        autocast=True,
        attention="eager",
        micro_batch=2,
        rank=32,
        targets="attention",
        lora_dropout=0.1,
        loss=cross_entropy.KERNELS["chunked"],
        optimizer=FACTORIES["sgd"],
        compile=True,
    )


def test_a_full_config_has_no_adapters_to_plan() -> None:
    made = make_plan(config(), job(LLAMA, lora_dropout=0.1), CPU)
    assert (made.rank, made.targets, made.lora_dropout) == (None, None, 0.0)
    assert plan(config(attention="flash")).attention == "flash_attention_2"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_kernel_of_attention_reaches_the_model(attention: str) -> None:
    skeleton: Any = make_skeleton(config(attention=attention), plan(config(attention=attention)), LLAMA)
    assert skeleton.config._attn_implementation == attention


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_skeleton_has_shapes_and_formats_but_no_storage(method: str) -> None:
    asked = config(method=method)
    skeleton = make_skeleton(asked, plan(asked), LLAMA)
    assert all(p.is_meta for p in skeleton.parameters())
    final = built(asked).module.model
    if method != "qlora":  # which packs its weights when they exist
        shapes = {n: (p.shape, p.dtype, p.requires_grad) for n, p in skeleton.named_parameters()}
        assert shapes == {n: (p.shape, p.dtype, p.requires_grad) for n, p in final.named_parameters()}


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_built_step_trains_and_has_one_device_and_no_cache(method: str) -> None:
    step = built(config(method=method))
    assert isinstance(step.engine, LocalEngine)
    assert all(module.training for module in step.module.modules())
    assert unwrap(step.module.model).config.use_cache is False
    assert {t.device for t in [*step.module.parameters(), *step.module.buffers()]} == {CPU}


def test_building_leaves_torchs_defaults_as_they_were() -> None:
    built(config(method="qlora", precision="bf16"))
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_default_device() == CPU
    assert torch.is_grad_enabled()
