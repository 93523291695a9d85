"""What kernels allocate within one operation, beside PyTorch's own account of it."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from autofit.estimate.kernels.cuda_kernels import cuda_scratch
from autofit.estimate.kernels.scratch import Held, host_scratch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_logsumexp_holds_the_exponentials_of_all_its_operand(dtype: torch.dtype) -> None:
    logits = torch.rand(64, 1000).to(dtype)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        torch.logsumexp(logits, dim=1)
    within = max(event.cpu_memory_usage for event in profiled.events())
    for scratch in (host_scratch, cuda_scratch):
        assert scratch("aten.logsumexp.default", (logits, [1])) == Held(beside=(within,))


def test_a_log_softmax_holds_nothing_but_its_result() -> None:
    logits = torch.rand(64, 1000)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        result = torch.log_softmax(logits, dim=1)
    assert max(event.cpu_memory_usage for event in profiled.events()) == result.nbytes
    assert host_scratch("aten._log_softmax.default", (logits, 1, False)) == Held()
