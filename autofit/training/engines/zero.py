"""DeepSpeed: ZeRO's stages over the ranks, and offloading to host memory or to files."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autofit.techniques.axes.optimizer import LEARNING_RATE, trainable, weight_decay
from autofit.techniques.technique import BuildPlan

INFERENCE_OP = "deepspeed_shm_comm"
"""DeepSpeed's shared-memory all-reduce for CPU inference. Training never calls it, but DeepSpeed would compile it,
allocate 130 MiB for it and leave named segments behind when killed."""


def deepspeed(plan: BuildPlan) -> Any:
    """The library, set up for the device and kept quiet: it logs only errors, on standard error."""
    os.environ.setdefault("DS_ACCELERATOR", plan.device.type)
    os.environ["LOCAL_RANK"] = str(plan.device.index or 0)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed

    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.ERROR)
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    # Its collectives use names that torch has deprecated, and torch warns at every call.
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use `torch.distributed", category=FutureWarning)
    deepspeed.ops.__compatible_ops__ = {INFERENCE_OP: False}  # else every op is probed, running compilers
    if plan.device.type == "cuda":
        _ask_driver_for_memory(deepspeed.accelerator.get_accelerator())
    deepspeed.init_distributed(verbose=False, dist_init_required=False if deepspeed.comm.is_initialized() else None)
    return deepspeed


def _ask_driver_for_memory(accelerator: Any) -> None:
    """Let DeepSpeed ask CUDA how much memory is free within a memory limit. By itself it asks NVML for the device whose
    number CUDA_VISIBLE_DEVICES gives, and fails in stages 1 and 2 if that is a UUID, as in every trial
    (`cuda_accelerator.py`, 0.19)."""

    def available_memory(device_index: int | None = None) -> int:
        free, total = torch.cuda.mem_get_info(device_index)
        limit = int(total * torch.cuda.get_per_process_memory_fraction(device_index))
        return min(free, limit - torch.cuda.memory_reserved(device_index))

    accelerator.available_memory = available_memory


class ZeroSharder:
    """Converts weights to the format that DeepSpeed keeps on the device; in stage 3 it also partitions them at once."""

    def __init__(self, plan: BuildPlan) -> None:
        self._plan = plan
        self._library = deepspeed(plan)
        self._settings = plan.deepspeed or {}
        self._partitions = self._settings["zero_optimization"]["stage"] == 3
        self._swapper: Any = None
        """Writes parameters to files; None if they are not kept in files, or before the first is written."""

    def shard(self, module: nn.Module) -> None:
        """Convert the parameters of `module`; in stage 3, keep only this rank's share of each."""
        if self._plan.narrowed:
            for parameter in module.parameters():
                if parameter.is_floating_point() and not hasattr(parameter, "ds_id"):
                    parameter.data = parameter.data.to(self._plan.compute_dtype)
        if self._partitions:
            # A second swapper would begin by deleting the first one's files.
            parameters: Iterable[Any] = module.parameters()
            swapper = self._swapper or next((p.nvme_swapper for p in parameters if hasattr(p, "nvme_swapper")), None)
            init = self._library.zero.Init
            self._swapper = init(module, config_dict_or_path=self._settings, param_swapper=swapper).param_swapper

    def whole(self, modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Gather the parameters that `modules` hold; what is written to them is partitioned afterwards."""
        if not self._partitions:
            return nullcontext()
        parameters = [p for module in modules for p in module.parameters(recurse=False)]
        gathered: AbstractContextManager[None] = self._library.zero.GatheredParameters(parameters, modifier_rank=0)
        return gathered


class ZeroEngine:
    """A DeepSpeed engine. In stages 2 and 3, which keep only a rank's share of the gradients, it reduces them in the
    backward pass of every micro-batch; in stage 1, only in that of the last."""

    def __init__(self, module: nn.Module, plan: BuildPlan) -> None:
        ZeroSharder(plan).shard(module)
        optimizer = plan.optimizer(module) if plan.config["offload"] == "none" else _adam_on_host(module, plan)
        with redirect_stdout(sys.stderr):  # it prints memory reports whatever its log level
            self._engine, *_ = deepspeed(plan).initialize(model=module, optimizer=optimizer, config=plan.deepspeed)
        self.root: nn.Module = self._engine
        self.ranks = dist.get_world_size()

    def prepare(self, *, last: bool) -> None:
        """Tell DeepSpeed whether this micro-batch ends the accumulation."""
        self._engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of `loss`. DeepSpeed averages over ranks; the factor turns that into a sum. It is
        told not to average over micro-batches, for which the loss is already divided."""
        self._engine.backward(loss * self.ranks, scale_wrt_gas=False)

    def update(self) -> torch.Tensor:
        self._engine.step()
        return torch.as_tensor(self._engine.get_global_grad_norm()).detach().float()


def _adam_on_host(module: nn.Module, plan: BuildPlan) -> Any:
    """DeepSpeed's CPU Adam, with the settings of torch's AdamW."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(
        trainable(module),
        lr=LEARNING_RATE,
        weight_decay=weight_decay("adamw"),
        adamw_mode=True,
        fp32_optimizer_states=plan.trained_dtype == torch.float32,
    )
