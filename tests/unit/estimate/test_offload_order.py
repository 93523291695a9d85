"""What the axes offload and sharding claim about memory on an accelerator, held against the estimator."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from unit.operations.made_trials import OPTIONS, STACK, make_job

from autofit.core.lattice import Lattice
from autofit.estimate.estimator import Estimator
from autofit.estimate.tracing.trace_cache import TraceCache
from autofit.techniques import AXES, complete, holds, unsupported

SHARDINGS = {1: ("none",), 2: ("zero1", "zero2", "zero3", "fsdp", "fsdp-no-reshard")}


@pytest.mark.parametrize(("model", "devices"), [("smollm2-135m", 2), ("gemma-3-1b", 1)])
def test_what_is_claimed_to_be_lighter_is_predicted_to_be(model: str, devices: int) -> None:
    """Of a small model and of one that is mostly embeddings, where buckets and gathered parameters weigh most."""
    options = replace(OPTIONS, model=model, seq_len=512, global_batch=8, devices=devices)
    job = make_job(options, stack=replace(STACK, deepspeed="0.19.8"))
    plain = {"precision": "bf16-mixed", "micro_batch": 4, "checkpointing": "full", "loss": "chunked"}
    every = [
        complete({**plain, "sharding": sharding, "offload": offload})
        for sharding, offload in itertools.product(SHARDINGS[devices], ("params", "optimizer", "none"))
    ]
    configs = [c for c in every if unsupported(c, job) is None]
    lattice = Lattice(axes=AXES, configs=tuple(configs), holds=holds(job))
    estimator = Estimator(job, None, cache=TraceCache.of_user())  # one decoder is that of both numbers of devices
    size = {c: estimator.estimate(c, memory_limit_bytes=job.hardware.memory_bytes).device_bytes for c in configs}
    claims = [(light, heavy) for light in configs for heavy in lattice.above(light) if light != heavy]
    assert len(claims) >= 2
    assert [(str(a), str(b)) for a, b in claims if size[a] > size[b]] == []
