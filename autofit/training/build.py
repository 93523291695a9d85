"""Builds a training step from a config: the techniques make the decisions, this file carries them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from autofit.catalog.models import architecture
from autofit.catalog.quiet import errors_only
from autofit.core.lattice import Config
from autofit.techniques import TECHNIQUES, Job
from autofit.techniques.axes.attention import IMPLEMENTATIONS
from autofit.techniques.axes.precision import in_tf32
from autofit.techniques.deepspeed_settings import deepspeed_settings
from autofit.techniques.habits import habits, masks_padding
from autofit.techniques.selective import budget
from autofit.techniques.technique import BuildPlan
from autofit.training import engines
from autofit.training.decoder import keep_layers
from autofit.training.loss_module import LossModule
from autofit.training.prerequisites import native_ops, nvme
from autofit.training.rows import Rows
from autofit.training.step import TrainingStep
from autofit.training.weights import materialise


def make_plan(config: Config, job: Job, device: torch.device) -> BuildPlan:
    """The decisions of the config's techniques, and of the trainer's habits, for a step on `device`."""
    plan = BuildPlan(config=config, job=job, device=device, parts=(*TECHNIQUES, *habits(config, job.workload.trainer)))
    for part in plan.parts:
        part.plan(plan)
    plan.masks_padding = masks_padding(config, job)
    return plan


@errors_only()
def make_skeleton(plan: BuildPlan, layers: Sequence[int] | None = None) -> nn.Module:
    """The model on the meta device: every shape and dtype is final, nothing has storage.

    With `layers`, only the decoder layers at those indices are kept.
    """
    from transformers import AutoModelForCausalLM

    full = plan.config["method"] == "full"
    with torch.device("meta"):
        skeleton: Any = AutoModelForCausalLM.from_config(
            architecture(plan.job.model),
            dtype=plan.trained_dtype if full else plan.compute_dtype,
            attn_implementation=plan.attention,
        )
    if layers is not None:
        keep_layers(skeleton, layers)
    for part in plan.parts:
        skeleton = part.on_skeleton(plan, skeleton)
    return cast(nn.Module, skeleton)


def build(config: Config, job: Job, device: torch.device, *, layers: Sequence[int] | None = None) -> TrainingStep:
    """The training step of `config`, with random weights on `device`; seed torch first for reproducible weights. With
    `layers`, the model is cut to the decoder layers at those indices.

    The same seed gives the same weights whether or not they are sharded. Where `techniques.needs_process_group` is
    true, every rank must call this, within torch.distributed's default process group. The config must be supported
    (see `techniques.unsupported`). Raises `EnvironmentLacks` if this machine lacks something that offloading needs, and
    whatever torch raises when memory runs out.
    """
    native_ops.require(config)
    for operation in native_ops.operations_of(config):
        native_ops.load(operation)
    plan = make_plan(config, job, device)
    # Set for the whole process. Without TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which some images set, it is "highest".
    torch.set_float32_matmul_precision("high" if in_tf32(config) else "highest")
    if config["offload"] == "nvme":
        plan.deepspeed = deepspeed_settings(config, job, folder=str(nvme.require_on_all_ranks(config, job)))
    model = make_skeleton(plan, layers)
    materialise(model, device=device, sharder=engines.sharder(plan))
    for part in plan.parts:
        part.on_model(plan, model)
    module = LossModule(
        model,
        plan.loss,
        plan.evaluated_loss,
        masks_padding=plan.masks_padding,
        rows=Rows(plan.sequences, device=device, joins=plan.attention == IMPLEMENTATIONS["flash"]),
        without_kernels=plan.without_kernels,
    )
    module.train()
    if config["compile"] is True:
        module.compile_layers(budget=budget(config))
    return TrainingStep(module, engines.make(module, plan), plan)
