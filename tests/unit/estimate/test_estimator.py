"""Estimates: what must hold of any of them, and what is known of some exactly."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_trace import MODELS
from test_trace import job as job_of
from tiny import CUDA_HARDWARE, STACK, model

from autofit.catalog.models import load
from autofit.estimate.allocator import SMALL_BUFFER
from autofit.estimate.estimate import Estimate
from autofit.estimate.estimator import Estimator
from autofit.estimate.speed import guess
from autofit.hardware import Hardware
from autofit.lattice import Config
from autofit.techniques import AXES, Job, complete, parse, unsupported
from autofit.units import GIB
from autofit.workload import Workload

RATES = guess(flops=1e15, wide_flops=5e13, bandwidth=3e12)
CPU = Hardware(name="cpu-x", kind="cpu", device_name="x", memory_bytes=64 * GIB, cores=2)


def job(name: str, *, seq_len: int = 2048, global_batch: int = 16, hardware: Hardware = CUDA_HARDWARE) -> Job:
    of = load(name)
    workload = Workload(model=of.name, model_digest=of.digest, seq_len=seq_len, global_batch=global_batch)
    return Job(model=of, workload=workload, hardware=hardware, stack=STACK)


def predicted(text: str, of: Job) -> Estimate:
    return Estimator(of, RATES).estimate(complete(parse(text)), memory_limit_bytes=80 * GIB)


@pytest.mark.parametrize(
    ("config", "weights", "gradients", "optimizer"),
    [
        ("method=full,precision=bf16,checkpointing=full", 2, 2, 4),
        ("method=full,precision=bf16-mixed,checkpointing=full", 4, 4, 8),
        ("method=full,precision=bf16,checkpointing=full,optimizer=sgd", 2, 2, 0),
    ],
)
def test_weights_gradients_and_states_are_their_formats_times_the_parameters(
    config: str, weights: int, gradients: int, optimizer: int
) -> None:
    found = predicted(config + ",micro_batch=1", job("smollm2-135m"))
    parameters = load("smollm2-135m").parameters
    assert parameters is not None
    assert found.breakdown["weights"] == pytest.approx(weights * parameters, rel=2e-3)
    assert found.breakdown["optimizer"] == pytest.approx(optimizer * parameters, rel=2e-3)
    assert found.breakdown["gradients"] <= gradients * parameters * 1.002


DEVICE_STACK = replace(STACK, liger_kernel="0.8.5", flash_attn="2.8.3", deepspeed="0.19.8")
BATCH, SEQ_LEN, LAYERS = 8, 64, 4


@cache
def tiny(*, seq_len: int = SEQ_LEN, layers: int = LAYERS, devices: int = 1) -> Estimator:
    """The estimator of a small job: it traces what configs have in common only once."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 2048, "max_position_embeddings": 1024}
    of = model("llama", num_hidden_layers=layers, **sizes)
    workload = Workload(
        model=of.name, model_digest=of.digest, seq_len=seq_len, global_batch=BATCH * devices, devices=devices
    )
    hardware = replace(CUDA_HARDWARE, count=devices)
    return Estimator(Job(model=of, workload=workload, hardware=hardware, stack=DEVICE_STACK), None)


@st.composite
def configs(draw: st.DrawFn) -> tuple[Config, int]:
    """A config that works on a card, and the number of devices that it trains on: any value of every axis."""
    devices = draw(st.sampled_from([1, 2]))
    values = {axis.name: draw(st.sampled_from(axis.values)) for axis in AXES if axis.values}
    values |= {"micro_batch": 2, "rank": draw(st.sampled_from([8, 32]))}
    if values["method"] == "full":
        del values["rank"], values["targets"]
    if devices == 1:
        values["sharding"] = "none"
    config = complete(values)
    assume(unsupported(config, tiny(devices=devices).job) is None)
    return config, devices


GROWTHS: dict[str, tuple[dict[str, int], ...]] = {
    "micro_batch": ({}, {}, {}, {}),
    "seq_len": ({}, {"seq_len": 2 * SEQ_LEN}),
    "layers": ({}, {"layers": LAYERS + 2}),
}
SMALL_BLOCKS = 4 * SMALL_BUFFER
"""By how much less may be reserved: blocks that grow beyond 1 MiB leave the pages of the small pool for those of the
large one, where there may be room. For no other reason would this model's reserved memory fall."""


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(configs(), st.sampled_from(sorted(GROWTHS)))
def test_more_of_anything_never_takes_less(drawn: tuple[Config, int], growth: str) -> None:
    """As accumulation goes on. The whole batch at once keeps no gradients beside its forward, and may be enough for the
    chunked loss to take two chunks, which are together less than one of half as many tokens."""
    config, devices = drawn
    found = [
        tiny(devices=devices, **size).estimate(
            config.replace(micro_batch=2**place) if growth == "micro_batch" else config, memory_limit_bytes=80 * GIB
        )
        for place, size in enumerate(GROWTHS[growth])
    ]
    for estimate in found:
        assert estimate.memory_error == 0.0, "traced"
        assert min(estimate.breakdown.values()) >= 0 and sum(estimate.breakdown.values()) == estimate.device_bytes
        assert 0 < estimate.peak_allocated_bytes <= estimate.peak_reserved_bytes < estimate.device_bytes
        assert max(estimate.phase_peaks.values()) == estimate.peak_allocated_bytes
    for less, more in itertools.pairwise(found):
        whole = more.config["micro_batch"] == BATCH
        if whole and config["loss"] == "chunked":
            continue
        gradients = less.breakdown["gradients"] if whole else 0
        assert less.peak_allocated_bytes <= more.peak_allocated_bytes + gradients
        assert less.peak_reserved_bytes <= more.peak_reserved_bytes + gradients + SMALL_BLOCKS
        assert less.device_bytes <= more.device_bytes + gradients + SMALL_BLOCKS


def test_a_processor_has_no_context_and_one_figure_for_all_memory() -> None:
    of = job("smollm2-135m", seq_len=128, global_batch=4, hardware=CPU)
    config = complete(parse("method=full,precision=bf16,micro_batch=4"))
    found = Estimator(of, None).estimate(config, memory_limit_bytes=2 * GIB)
    assert found.device_bytes == found.peak_reserved_bytes == found.peak_allocated_bytes == found.host_bytes
    assert found.breakdown["context"] == 0 and found.breakdown["fragmentation"] > 0
    assert sum(found.breakdown.values()) == found.device_bytes == max(found.phase_peaks.values())
    assert any("C library" in sentence for sentence in found.assumptions)
    assert found.tokens_per_second is None and found.mfu is None


@pytest.mark.parametrize("optimizer", ["adamw-8bit", "lion"])
def test_on_a_processor_bitsandbytes_updates_copies_in_fp32(optimizer: str) -> None:
    config = complete(parse(f"method=full,precision=bf16,optimizer={optimizer}"))
    on_host, on_device = (
        Estimator(job("smollm2-135m", seq_len=32, global_batch=1, hardware=hardware), None).trace(config).timeline
        for hardware in (CPU, CUDA_HARDWARE)
    )
    largest = 49152 * 576  # the embedding
    more = on_host.phase_peaks()["optimizer"] - on_device.phase_peaks()["optimizer"]
    assert more >= 3 * 4 * largest  # its state, its gradient and itself, or more of each


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ungrouped", "method=full,precision=bf16-mixed,checkpointing=none,loss=chunked"),
        ("gqa", "method=lora,precision=bf16,checkpointing=every-2"),
        ("tied", "method=full,precision=bf16,checkpointing=full,optimizer=adamw-8bit"),
        ("sliding", "method=qlora,precision=bf16,checkpointing=selective"),
        ("mixture", "method=full,precision=bf16,checkpointing=every-4,optimizer=sgd"),
    ],
)
def test_an_exact_estimate_is_that_of_a_few_layers_repeated(name: str, text: str) -> None:
    config, of = complete(parse(f"{text},micro_batch=2")), job_of(MODELS[name])
    quick, exact = (Estimator(of, RATES, exact=way).estimate(config, memory_limit_bytes=GIB) for way in (False, True))
    assert quick.memory_error == exact.memory_error == 0.0, "both traced"
    assert quick.peak_allocated_bytes == exact.peak_allocated_bytes
    assert quick.peak_reserved_bytes == exact.peak_reserved_bytes
    assert (quick.breakdown, quick.phase_peaks) == (exact.breakdown, exact.phase_peaks)
    assert quick.step_seconds == pytest.approx(exact.step_seconds, rel=1e-9)
