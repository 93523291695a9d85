"""What configs share of their traces, as the axes declare it (`Technique.parts`), changes none of their estimates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from tiny import CUDA_HARDWARE, LLAMA_TIED, STACK, job

from autofit.core.lattice import Config
from autofit.core.units import GIB
from autofit.estimate.estimator import Estimator
from autofit.techniques import AXES, Job, complete, parse, unsupported

NUMBERS = {"rank": (8, 16), "micro_batch": (1, 2, 4)}
EVERY = [axis.name for axis in AXES if axis.name != "compile"]
"""But for the one whose traces take long; `test_fused_graph.py` has those."""


def of_every_part(devices: int = 1, trainer: str | None = None) -> Job:
    """A job whose steps have every part, with a head that is the embedding and sequences of several lengths."""
    stack = replace(STACK, liger_kernel="0.8.5", flash_attn="2.8.3", deepspeed="0.19.8")
    asked = {"devices": devices, "trainer": trainer, "lengths": (32, 64, 128), "eval_batch": 2}
    hardware = replace(CUDA_HARDWARE, count=devices)
    return job(LLAMA_TIED, hardware=hardware, stack=stack, seq_len=128, global_batch=4 * devices, **asked)


def around(base: Config, of: Job, axes: Sequence[str]) -> Iterator[Config]:
    """`base`, and each possible config that differs from it in one value of these axes."""
    yield base
    for axis in (axis for axis in AXES if axis.name in axes and axis.of(base) is not None):
        for value in NUMBERS.get(axis.name, axis.values):
            values = {**base.to_json(), axis.name: value}
            without = ("rank", "targets") if values["method"] == "full" else ()
            config = complete({name: value for name, value in values.items() if name not in without})
            if config != base and unsupported(config, of) is None:
                yield config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "of", "axes"),
    [
        ("method=full,precision=bf16,micro_batch=4", of_every_part(), EVERY),
        ("method=full,precision=bf16,micro_batch=4,update=in-backward", of_every_part(), ("micro_batch", "optimizer")),
        ("method=lora,precision=bf16,micro_batch=2,loss=chunked", of_every_part(), ("method", "rank", "targets")),
        (
            "method=full,precision=bf16,micro_batch=4,loss=chunked,sharding=zero2",
            of_every_part(2, "trl"),
            ("micro_batch", "loss", "sharding"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_traced_once_for_several_configs_is_what_each_would_trace(
    text: str, of: Job, axes: Sequence[str]
) -> None:
    sharing = Estimator(of, None)

    def found(by: Estimator, config: Config) -> tuple[object, ...]:
        whole = by.footprint(config, memory_limit_bytes=80 * GIB)
        allocated, reserved = whole.peak_allocated_bytes, whole.peak_reserved_bytes
        return whole.untraced, allocated, reserved, whole.phase_peaks, whole.host_bytes, whole.breakdown, whole.work

    configs = list(around(complete(parse(text)), of, axes))
    assert len(configs) > len(axes)
    for config in configs:
        assert found(sharing, config) == found(Estimator(of, None), config), str(config)
