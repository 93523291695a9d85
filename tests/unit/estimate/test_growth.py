"""Random configs on a card and on a processor: sums that add up, nothing negative, and more of anything takes more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import tiny
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tiny import CPU_HARDWARE, CUDA_HARDWARE, model

from autofit.core.lattice import Config
from autofit.core.units import GIB
from autofit.estimate.estimate import Estimate
from autofit.estimate.estimator import Estimator
from autofit.estimate.memory.allocator import MIN_BLOCK
from autofit.estimate.memory.heap import MAPPED_BYTES
from autofit.estimate.memory.timeline import Timeline
from autofit.techniques import AXES, complete, unsupported

HARDWARE = {hardware.kind: hardware for hardware in (CUDA_HARDWARE, CPU_HARDWARE)}
STACK = replace(tiny.STACK, liger_kernel="0.8.5", flash_attn="2.8.3", deepspeed="0.19.8")
BATCH, LIMIT = 8, 80 * GIB
DECODERS, CONFIGS = 6, 4
REFITTED = 0.2
"""By what share less a card's allocator may reserve for more: its segments grow in pages and at their end alone, so
what stays free between blocks depends on how their sizes fit each other. 0.13 at most over some hundred configs."""


@cache
def estimator(kind: str, devices: int, seq_len: int, layers: int) -> Estimator:
    """Of a model that is small in depth alone: its blocks are as large as those of actual models."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 32000, "max_position_embeddings": 2048}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    of = model("llama", num_hidden_layers=layers, tie_word_embeddings=False, **sizes, **heads)
    hardware, batch = replace(HARDWARE[kind], count=devices), BATCH * devices
    job = tiny.job(of, hardware=hardware, stack=STACK, seq_len=seq_len, global_batch=batch, devices=devices)
    return Estimator(job, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A config of a job."""

    config: Config
    kind: str
    """Of the hardware."""
    devices: int
    seq_len: int
    layers: int

    @property
    def estimator(self) -> Estimator:
        return estimator(self.kind, self.devices, self.seq_len, self.layers)

    def estimate(self) -> Estimate:
        return self.estimator.estimate(self.config, memory_limit_bytes=LIMIT)

    def timeline(self) -> Timeline:
        return self.estimator.trace(self.config).timeline

    def grown(self) -> Iterator[Case]:
        """With twice the micro-batch, with longer sequences, with more layers."""
        yield replace(self, config=self.config.replace(micro_batch=2 * self.config.number("micro_batch")))
        yield replace(self, seq_len=2 * self.seq_len)
        yield replace(self, layers=self.layers + 2)


OF_UPDATE = ("optimizer", "loss", "micro_batch", "rank")
"""Axes that configs with one decoder differ in: the decoder, which takes longest, is traced once for all of them."""


@st.composite
def cases(draw: st.DrawFn) -> list[Case]:
    """Any value of every axis that works on the hardware, and any size: some configs that have their decoder in
    common."""
    values = {axis.name: draw(st.sampled_from(axis.values)) for axis in AXES if axis.values}
    devices = draw(st.sampled_from([1, 2]))
    if devices == 1:
        values["sharding"] = "none"
    kind, seq_len, layers = (draw(st.sampled_from(s)) for s in (sorted(HARDWARE), [64, 96, 128, 256, 512], [2, 4, 6]))
    every = {axis.name: axis.values for axis in AXES} | {"micro_batch": (1, 2, 4), "rank": (8, 32)}
    supported = []
    for _ in range(CONFIGS):
        values |= {axis: draw(st.sampled_from(every[axis])) for axis in OF_UPDATE}
        without = {"rank", "targets"} if values["method"] == "full" else set()
        config = complete({axis: value for axis, value in values.items() if axis not in without})
        case = Case(config=config, kind=kind, devices=devices, seq_len=seq_len, layers=layers)
        if unsupported(config, case.estimator.job) is None:
            supported.append(case)
    assume(supported)
    return supported


def check_sums(estimate: Estimate) -> None:
    assert estimate.memory_error == 0.0, "traced"
    assert min(estimate.breakdown.values()) >= 0 and sum(estimate.breakdown.values()) == estimate.device_bytes
    assert 0 < estimate.peak_allocated_bytes <= estimate.peak_reserved_bytes <= estimate.device_bytes
    assert max(estimate.phase_peaks.values()) == estimate.peak_allocated_bytes


def may_fall(less: Case, more: Case, estimate: Estimate) -> int:
    """By how much the tensors of `more` may truly take less. The whole batch at once keeps neither gradients nor the
    losses of two micro-steps beside its forward; and a loss of more tokens may be worth chunks, which are together less
    than all logits of fewer tokens."""
    chunks = less.layers == more.layers and less.config["loss"] == "chunked"
    whole = less.config != more.config and more.config["micro_batch"] == BATCH
    accumulated = estimate.breakdown["gradients"] + 2 * MIN_BLOCK if whole else 0
    return accumulated + (estimate.breakdown["logits_and_loss"] if chunks else 0)


def mapped(line: Timeline) -> int:
    """How many blocks the C library does not keep once they are freed."""
    return int(np.count_nonzero(line.sizes >= MAPPED_BYTES))


def check_growth(less: Case, more: Case) -> None:
    estimate, larger = less.estimate(), more.estimate()
    lines, slack = (less.timeline(), more.timeline()), may_fall(less, more, estimate)
    assert lines[0].peak() <= lines[1].peak() + slack
    if less.kind == "cuda":
        assert estimate.peak_allocated_bytes <= larger.peak_allocated_bytes + slack
        slack += int(REFITTED * estimate.peak_reserved_bytes)
    elif more.layers == less.layers and mapped(lines[0]) < mapped(lines[1]):
        slack += estimate.breakdown["fragmentation"]
    assert estimate.peak_reserved_bytes <= larger.peak_reserved_bytes + slack
    assert estimate.device_bytes <= larger.device_bytes + slack


@settings(
    max_examples=DECODERS,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(cases())
def test_more_of_anything_never_takes_less(drawn: list[Case]) -> None:
    """Of what is allocated exactly; of what is reserved up to how blocks fit each other; and of a processor's heap as
    long as no block grows so large that it is mapped alone, of which nothing is kept."""
    for less in drawn:
        check_sums(less.estimate())
        for more in less.grown():
            check_sums(more.estimate())
            check_growth(less, more)
