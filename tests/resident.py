"""What a rank's engine holds at a moment, counted on the engine itself: the truth that predictions are judged by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autofit.training.engines.local import LocalEngine
from autofit.training.step import TrainingStep

MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")
"""Where DeepSpeed's optimizers keep master copies: stages 1 and 2, stage 3, stage 1 with 16-bit weights."""
GRADIENTS = ("grad_partitions_flat_buffer", "fp32_groups_gradients_flat")
"""Where they keep gradients: stage 3, stage 1 with 16-bit weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """Bytes that one rank's engine holds at this moment, by purpose: those of its shard, or of everything where nothing
    is sharded. Gradients exist between `backward` and `update`, optimizer states from the first update on."""

    parameters: int
    """On the device, including the constants of quantised parameters; excludes what is gathered temporarily."""
    gradients: int
    """On the device."""
    optimizer: int
    """On the device: states, plus the master copies where the library keeps a second copy of the parameters."""
    host_parameters: int = 0
    host_gradients: int = 0
    host_optimizer: int = 0


def resident(step: TrainingStep, offload: str = "none") -> Resident:
    """What this rank holds at this moment, of a step whose config has this `offload`."""
    if isinstance(step.engine, LocalEngine):
        return _of_torch(step, step.engine.optimizer, on_host=offload == "params")
    return _of_deepspeed(step, offload)


def _of_torch(step: TrainingStep, made: torch.optim.Optimizer, *, on_host: bool) -> Resident:
    own = list(step.module.parameters())
    constants, parameters = quantisation_bytes(step.module), held(own)
    gradients = held(p.grad for p in own if p.requires_grad and p.grad is not None)
    optimizer = held(states(made))
    if on_host:
        return Resident(
            parameters=constants,
            gradients=0,
            optimizer=0,
            host_parameters=parameters,
            host_gradients=gradients,
            host_optimizer=optimizer,
        )
    return Resident(parameters=parameters + constants, gradients=gradients, optimizer=optimizer)


def _of_deepspeed(step: TrainingStep, offload: str) -> Resident:
    """Shards are views of flat buffers: each buffer is counted once, by its first use."""
    zero: Any = step.engine.root.optimizer
    own: list[Any] = list(step.module.parameters())
    masters = [t for name in MASTERS for t in getattr(zero, name, [])] + states(zero.optimizer)
    # Wherever DeepSpeed keeps them apart from the parameters: on the master copies, in partitions, summed on the host.
    apart = [
        *(t.grad for t in masters if t.grad is not None),
        *(t for group in getattr(zero, "averaged_gradients", {}).values() for t in group or []),
        *(t for name in GRADIENTS for t in _listed(getattr(zero, name, None))),
        *getattr(zero, "accumulated_grads_in_cpu", {}).values(),
    ]
    counted: set[int] = set()
    shared = _storages([p.ds_tensor for p in own if hasattr(p, "ds_tensor")], counted)
    whole = _storages(own, counted)
    optimizer = _storages(masters, counted)
    of_backward = _storages([p.grad for p in own if p.grad is not None], counted)
    gradients = _storages(apart, counted)
    on_host, params_on_host = offload != "none", offload not in ("none", "optimizer")
    return Resident(
        parameters=whole + quantisation_bytes(step.module) + (0 if params_on_host else shared),
        gradients=of_backward + (0 if on_host else gradients),
        optimizer=0 if on_host else optimizer,
        host_parameters=shared if params_on_host else 0,
        host_gradients=gradients if on_host else 0,
        host_optimizer=optimizer if on_host else 0,
    )


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of `tensors` on this rank; a sharded tensor counts with its local shard only."""
    return sum(local(tensor).nbytes for tensor in tensors)


def local(tensor: Any) -> torch.Tensor:
    """This rank's shard of a sharded tensor; any other tensor itself."""
    shard: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The states of all parameters, without the step counts, which are scalars, and bitsandbytes' maps of 8-bit values:
    2 KiB, to which every parameter's state refers."""
    return [
        t
        for state in optimizer.state.values()
        for name, t in state.items()
        if isinstance(t, torch.Tensor) and not name.startswith("qmap") and t.dim() > 0
    ]


def quantisation_bytes(model: nn.Module) -> int:
    """Bytes of the constants that dequantise the 4-bit weights of `model`; every rank holds all of them."""
    return sum(_constants(module.quant_state) for module in model.modules() if getattr(module, "quant_state", None))


def _constants(state: Any) -> int:
    nested = [state.state2.absmax, state.state2.code, state.offset] if state.nested else []
    return sum(t.nbytes for t in (state.absmax, state.code, *nested))


def _listed(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value or [])


def _storages(tensors: Iterable[torch.Tensor], counted: set[int]) -> int:
    """Bytes of the distinct storages behind `tensors` that are not yet in `counted`; adds these to it."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += storage.nbytes()
    return total
