"""What an optimizer needs to run on fake parameters, and to do there what it does on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast
from unittest.mock import patch

import torch

from autofit.estimate.tracing.recorder import Recorder
from autofit.techniques import Job


def give_quantisation_maps(optimizer: torch.optim.Optimizer) -> None:
    """Replace bitsandbytes' own maps, which hold data, with fake ones of the same size."""
    maps = getattr(cast(Any, optimizer), "name2qmap", None)
    if maps is not None:
        maps.update(dynamic=torch.empty(256), udynamic=torch.empty(256))


@contextmanager
def as_on_host(job: Job) -> Iterator[None]:
    """On a CPU: have bitsandbytes' update run as what it is there, several torch operations on fp32 copies. Its shape
    rule treats the update as one kernel, which it is on a device."""
    if job.hardware.kind != "cpu" or job.stack.bitsandbytes is None:
        yield
        return
    from bitsandbytes.backends.cpu import ops

    # Private, and so present in some versions only: in others the shape rule stays in force.
    names = ("optimizer_update_8bit_blockwise", "optimizer_update_32bit")
    kernels = {name: getattr(ops, f"_{name}_cpu") for name in names if hasattr(ops, f"_{name}_cpu")}
    with patch.multiple(torch.ops.bitsandbytes, **kernels) if kernels else nullcontext():
        yield


PAGED_FROM = 100_000
"""From this many elements on, bitsandbytes puts a state into managed memory (Optimizer8bit.get_state_buffer of
bitsandbytes/optim/optimizer.py)."""


def page_states(optimizer: Any, recorder: Recorder) -> None:
    """Have a paged optimizer page as it does on a device: on the host bitsandbytes warns and does not."""
    if not getattr(optimizer, "is_paged", False):
        return

    def state_buffer(parameter: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with recorder.outside_allocator() if parameter.numel() >= PAGED_FROM else nullcontext():
            return torch.zeros_like(parameter, dtype=dtype)

    optimizer.get_state_buffer = state_buffer
