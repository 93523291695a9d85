"""Every rank holds a share of each parameter, its gradient and its states; a layer is gathered while it is used.

torch's `fully_shard` (FSDP 2) is applied to every decoder layer, then to the root, which holds the rest: embeddings,
final norm and head.

Mixed precision is the library's own: fp32 shards, gathered and used in 16 bits, with gradients reduced in fp32.
Autocast over fp32 weights would gather twice the bytes and keep both formats of a layer. As a result the residual
stream is in 16 bits here, where autocast keeps it in fp32; the losses agree within 16-bit rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autofit.techniques.technique import BuildPlan
from autofit.training.engines.local import LocalEngine


class FsdpSharder:
    """Shards a model while it is built: each decoder layer as soon as it has its weights."""

    def __init__(self, plan: BuildPlan) -> None:
        self._plan = plan

    def shard(self, module: nn.Module) -> None:
        """Keep this rank's share of every parameter of `module` that is not sharded yet."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        plan = self._plan
        narrow = MixedPrecisionPolicy(param_dtype=plan.compute_dtype, reduce_dtype=torch.float32)
        in_host_memory = CPUOffloadPolicy(pin_memory=plan.device.type == "cuda")
        fully_shard(
            module,
            mesh=init_device_mesh(plan.device.type, (dist.get_world_size(),)),
            reshard_after_forward=plan.config["sharding"] != "fsdp-no-reshard",
            mp_policy=narrow if plan.narrowed else MixedPrecisionPolicy(),
            offload_policy=in_host_memory if plan.config["offload"] == "params" else OffloadPolicy(),
        )

    @contextmanager
    def whole(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Replace the parameters that `modules` hold by whole, empty tensors; what is written is sharded afterwards."""
        swapped = [(m, name, p) for m in modules for name, p in m._parameters.items() if p is not None]
        for module, name, parameter in swapped:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._plan.device)
            module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        yield
        with torch.no_grad():
            for module, name, parameter in swapped:
                full = module._parameters[name]
                module._parameters[name] = parameter
                assert full is not None
                share = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                rows = -(-parameter.shape[0] // dist.get_world_size())
                share.copy_(full[dist.get_rank() * rows :][: share.shape[0]])


class FsdpEngine(LocalEngine):
    """Gradients are reduced in the backward pass of every micro-batch: waiting for the last one would mean keeping them
    whole, which sharding is there to avoid."""

    def __init__(self, root: nn.Module, plan: BuildPlan) -> None:
        from torch.distributed.fsdp import FSDPModule

        FsdpSharder(plan).shard(root)
        super().__init__(root, plan)
        self.ranks = dist.get_world_size()
        for module in root.modules():
            if isinstance(module, FSDPModule):
                # A plain sum: gloo supports it, and the loss is divided accordingly.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def update(self) -> torch.Tensor:
        norm: Any = super().update()
        whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole
