"""From a config to a step: what is decided before anything is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofit.techniques.adapters import unwrap
from autofit.techniques.losses import cross_entropy
from autofit.training.build import make_plan, make_skeleton
from autofit.training.engines.local import LocalEngine
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
    assert (made.autocast, made.loss_scaling) == (compute if autocast else None, scaling)


def test_every_axis_leaves_its_decision_in_the_plan() -> None:
    requested = config(
        method="lora", rank=32, targets="attention", micro_batch=2, attention="eager", loss="chunked", optimizer="sgd"
    )
    made = make_plan(requested, job(LLAMA), CPU)
    assert (made.trained_dtype, made.compute_dtype, made.autocast) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert (made.attention, made.loss) == ("eager", cross_entropy.KERNELS["chunked"])
    assert type(made.optimizer(torch.nn.Linear(1, 1))) is torch.optim.SGD
    assert plan(config(attention="flash")).attention == "flash_attention_2"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_kernel_of_attention_reaches_the_model(attention: str) -> None:
    skeleton: Any = make_skeleton(plan(config(attention=attention)))
    assert skeleton.config._attn_implementation == attention


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_skeleton_has_shapes_and_formats_but_no_storage(method: str) -> None:
    requested = config(method=method)
    skeleton = make_skeleton(plan(requested))
    assert all(p.is_meta for p in skeleton.parameters())
    final = built(requested).module.model
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
