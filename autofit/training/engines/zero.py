"""DeepSpeed: ZeRO's stages over the ranks, and what waits on the host or in files."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from autofit.training.engine import Resident
from autofit.training.engines.local import quantisation_bytes, states

if TYPE_CHECKING:
    from autofit.techniques.technique import OptimizerFactory, Plan

INFERENCE_OP = "deepspeed_shm_comm"
"""DeepSpeed's sum over ranks in shared memory, for inference on a CPU: training never calls it, but DeepSpeed would
compile it, give it 130 MiB and leave named segments behind when killed."""
MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")
"""Where DeepSpeed's optimizers keep master copies: stages 1 and 2, stage 3, stage 1 with 16-bit weights."""
GRADIENTS = ("grad_partitions_flat_buffer", "fp32_groups_gradients_flat")
"""Where they keep gradients: stage 3, stage 1 with 16-bit weights."""


def deepspeed(plan: Plan) -> Any:
    """The library, set up for the device and quiet: only warnings, and those on standard error."""
    os.environ.setdefault("DS_ACCELERATOR", plan.device.type)
    os.environ["LOCAL_RANK"] = str(plan.device.index or 0)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed

    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.ERROR)
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    # Its collectives go by names that torch will drop, which torch says again at every call.
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use `torch.distributed", category=FutureWarning)
    deepspeed.ops.__compatible_ops__ = {INFERENCE_OP: False}  # else every op is probed, compilers run
    deepspeed.init_distributed(verbose=False, dist_init_required=False if deepspeed.comm.is_initialized() else None)
    return deepspeed


class ZeroSharder:
    """Turns weights into the format that DeepSpeed keeps on the device; in stage 3 also shares them out at once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._library = deepspeed(plan)
        self._settings = plan.deepspeed or {}
        self._partitions = self._settings["zero_optimization"]["stage"] == 3
        self._swapper: Any = None
        """Writes parameters to files; None where they have none, or before the first."""

    def shard(self, module: nn.Module) -> None:
        """Keep this rank's share of every parameter of `module`."""
        if self._plan.narrowed:
            for parameter in module.parameters():
                if parameter.is_floating_point() and not hasattr(parameter, "ds_id"):
                    parameter.data = parameter.data.to(self._plan.compute_dtype)
        if self._partitions:
            # A second one would begin by deleting the first one's files.
            own: Iterable[Any] = module.parameters()
            known = self._swapper or next((p.nvme_swapper for p in own if hasattr(p, "nvme_swapper")), None)
            made = self._library.zero.Init(
                module=module, config_dict_or_path=self._settings, param_swapper=known
            )  # fmt: skip
            self._swapper = made.param_swapper

    def whole(self, modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Let the parameters that `modules` hold be whole; what is written is shared out afterwards."""
        if not self._partitions:
            return nullcontext()
        held_here = [p for module in modules for p in module.parameters(recurse=False)]
        gathered: AbstractContextManager[None] = self._library.zero.GatheredParameters(held_here, modifier_rank=0)
        return gathered


class ZeroEngine:
    """A DeepSpeed engine. It reduces gradients in the backward pass of every micro-batch in stages 2 and 3, which keep
    their shares only, and of the last one in stage 1."""

    def __init__(self, module: nn.Module, make_optimizer: OptimizerFactory, plan: Plan) -> None:
        ZeroSharder(plan).shard(module)
        optimizer = _adam_on_host(module, plan) if plan.offload != "none" else make_optimizer(module)
        with redirect_stdout(sys.stderr):  # it reports memory there, whatever the level of its log
            self._engine, *_ = deepspeed(plan).initialize(model=module, optimizer=optimizer, config=plan.deepspeed)
        self._module = module
        self._offload = plan.offload
        self.root: nn.Module = self._engine
        self.ranks = dist.get_world_size()

    def prepare(self, *, last: bool) -> None:
        """Tell DeepSpeed whether this micro-batch ends the accumulation."""
        self._engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of `loss`. DeepSpeed averages over ranks: the factor makes it a sum. It does not average
        over micro-batches, for which the loss is divided already."""
        self._engine.backward(loss * self.ranks, scale_wrt_gas=False)

    def update(self) -> torch.Tensor:
        """One optimizer step; frees the gradients. Their L2 norm over all ranks before clipping, fp32 scalar."""
        self._engine.step()
        return torch.as_tensor(self._engine.get_global_grad_norm()).detach().float()

    def resident(self) -> Resident:
        """What this rank holds now. Shards are views of flat buffers: each is counted once, by what it is first."""
        counted: set[int] = set()
        own = list(self._module.parameters())
        shards = [p.ds_tensor for p in own if hasattr(p, "ds_tensor")]
        constants = quantisation_bytes(self._module)
        shared, whole = _storages(shards, counted), _storages(own, counted)
        optimizer, gradients = _storages(self._states(), counted), _storages(self._gradients(), counted)
        on_host = self._offload != "none"
        params_on_host = on_host and self._offload != "optimizer"
        return Resident(
            parameters=whole + constants + (0 if params_on_host else shared),
            gradients=0 if on_host else gradients,
            optimizer=0 if on_host else optimizer,
            host_parameters=shared if params_on_host else 0,
            host_gradients=gradients if on_host else 0,
            host_optimizer=optimizer if on_host else 0,
        )

    def _states(self) -> list[torch.Tensor]:
        """Master copies and the states of the optimizer that works on them."""
        zero = self._engine.optimizer
        masters = [t for name in MASTERS for t in getattr(zero, name, [])]
        return [*masters, *states(zero.optimizer)]

    def _gradients(self) -> list[torch.Tensor]:
        """Wherever DeepSpeed keeps gradients: at the parameters, in partitions, at the master copies, summed on the
        host."""
        zero = self._engine.optimizer
        summed = getattr(zero, "accumulated_grads_in_cpu", {}).values()
        partitions = [t for group in getattr(zero, "averaged_gradients", {}).values() for t in group or []]
        flat = [t for name in GRADIENTS for t in _listed(getattr(zero, name, None))]
        at = [p.grad for p in (*self._module.parameters(), *self._states()) if p.grad is not None]
        return [*at, *partitions, *flat, *summed]


def _listed(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value or [])


def _storages(tensors: Iterable[torch.Tensor], counted: set[int]) -> int:
    """Bytes of the distinct storages behind `tensors` that are not `counted` yet; adds them."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _adam_on_host(module: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """DeepSpeed's Adam for processors, with the settings of torch's AdamW."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from autofit.techniques.optimizer import LEARNING_RATE

    trained = [p for p in module.parameters() if p.requires_grad]
    made: torch.optim.Optimizer = DeepSpeedCPUAdam(
        trained,
        lr=LEARNING_RATE,
        weight_decay=1e-2,
        adamw_mode=True,
        fp32_optimizer_states=plan.trained_dtype == torch.float32,
    )
    return made
