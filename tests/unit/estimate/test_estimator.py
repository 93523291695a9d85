"""Estimates: what must hold of any of them, and what is known of some exactly."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import tiny
from test_trace import MODELS
from test_trace import job as job_of
from tiny import CUDA_HARDWARE, shallow

from autofit.catalog.models import load, shape
from autofit.core.device.hardware import Hardware
from autofit.core.lengths import padded
from autofit.core.units import GIB
from autofit.estimate.estimate import Estimate
from autofit.estimate.estimator import Estimator
from autofit.estimate.memory.lower_bound import floor_bytes
from autofit.estimate.time.guessed_rates import guess
from autofit.techniques import Job, complete, parse

RATES = guess(flops=1e15, wide_flops=5e13, bandwidth=3e12)
CPU = Hardware(name="cpu-x", kind="cpu", device_name="x", memory_bytes=64 * GIB, cores=2)


def job(name: str, *, seq_len: int = 2048, global_batch: int = 16, hardware: Hardware = CUDA_HARDWARE) -> Job:
    return tiny.job(load(name), hardware=hardware, seq_len=seq_len, global_batch=global_batch)


@cache
def estimator(of: Job) -> Estimator:
    return Estimator(of, RATES)


def predicted(text: str, of: Job) -> Estimate:
    return estimator(of).estimate(complete(parse(text)), memory_limit_bytes=80 * GIB)


def test_a_config_takes_the_same_each_time_that_it_is_traced() -> None:
    """Of those whose reserved memory depends on the order in which autocast drops its copies of the weights."""
    of = job("smollm2-135m", seq_len=128)
    config = complete(parse("method=full,micro_batch=16,loss=chunked,checkpointing=full"))
    held, found = [], []
    for _ in range(3):
        afresh = Estimator(of, None)
        found.append((afresh.trace(config), afresh.estimate(config, memory_limit_bytes=80 * GIB)))
        held.append([afresh, *(bytearray(size) for size in range(1000))])  # so that weights lie elsewhere the next time
    (first, estimate), *others = found
    for traced, again in others:
        assert traced.timeline.storages.tolist() == first.timeline.storages.tolist()
        assert traced.timeline.sizes.tolist() == first.timeline.sizes.tolist()
        assert again.peak_reserved_bytes == estimate.peak_reserved_bytes
        assert again.peak_allocated_bytes == estimate.peak_allocated_bytes


@pytest.mark.parametrize(
    "text",
    [
        "method=full,precision=bf16",
        "method=lora,checkpointing=full,loss=chunked",
        "method=lora,checkpointing=full,mlp=tiled,targets=attention,loss=chunked",
    ],
)
def test_sequences_with_lengths_take_the_time_of_a_mean_micro_batch_and_the_memory_of_the_longest(text: str) -> None:
    full = job_of(MODELS["gqa"])
    lengths = (*range(8, 64), 64)
    data = replace(full, workload=replace(full.workload, lengths=lengths))
    config = f"{text},micro_batch=2"
    found, longest = predicted(config, data), predicted(config, full)
    assert (found.peak_allocated_bytes, found.phase_peaks) == (longest.peak_allocated_bytes, longest.phase_peaks)
    assert longest.peak_reserved_bytes <= found.peak_reserved_bytes, "blocks of other sizes lie between"
    assert sum(found.breakdown.values()) == found.device_bytes
    each = {
        length: predicted(config, replace(full, workload=replace(full.workload, seq_len=length))).step_seconds
        for length, _ in padded(lengths, 2).shares[::14]
    }
    drawn = {length: share for length, share in padded(lengths, 2).shares if length in each}
    assert found.step_seconds is not None and longest.step_seconds is not None
    mean = sum(share * (each[length] or 0.0) for length, share in drawn.items()) / sum(drawn.values())
    assert found.step_seconds == pytest.approx(mean, rel=0.03)
    assert found.tokens_per_second == pytest.approx(data.workload.tokens_per_step / found.step_seconds)


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


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit"])
def test_within_the_backward_pass_an_update_does_the_same_and_needs_no_gradients(optimizer: str) -> None:
    of, text = job_of(MODELS["gqa"]), f"method=full,precision=bf16,micro_batch=4,optimizer={optimizer}"
    after, within = complete(parse(text)), complete(parse(f"{text},update=in-backward"))
    assert floor_bytes(after, of) - floor_bytes(within, of) == 2 * shape(of.model).parameters
    done, done_within = (Estimator(of, RATES).estimate(c, memory_limit_bytes=GIB).work for c in (after, within))
    assert done is not None and done_within is not None and not done_within.update
    kinds = {kind for kind in done.update if "update" in kind}
    assert kinds and all(done_within.amounts[kind] == pytest.approx(done.update[kind]) for kind in kinds)


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
    few = job_of(shallow("smollm2-135m", 2))
    on_host, on_device = (
        Estimator(replace(few, hardware=hardware), None).trace(config).timeline for hardware in (CPU, CUDA_HARDWARE)
    )
    largest = 49152 * 576  # the embedding
    more = on_host.phase_peaks()["optimizer"] - on_device.phase_peaks()["optimizer"]
    assert more >= 3 * 4 * largest  # its state, its gradient and itself, or more of each


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ungrouped", "method=full,precision=bf16-mixed,checkpointing=none,loss=chunked"),
        ("tied", "method=full,precision=bf16,checkpointing=full,optimizer=adamw-8bit"),
        ("sliding", "method=qlora,precision=bf16,checkpointing=selective"),
        ("mixture", "method=full,precision=bf16,checkpointing=every-4,optimizer=sgd"),
        ("ungrouped", "method=full,precision=bf16,checkpointing=full,optimizer=adafactor,update=in-backward"),
        ("tied", "method=full,precision=bf16-mixed,optimizer=adamw-8bit,loss=fused,update=in-backward"),
    ],
)
def test_an_exact_estimate_is_that_of_a_few_layers_repeated(name: str, text: str) -> None:
    config = complete(parse(f"{text},micro_batch={4 if 'in-backward' in text else 2}"))
    of = job_of(MODELS[name])
    quick, exact = (Estimator(of, RATES, exact=way).estimate(config, memory_limit_bytes=GIB) for way in (False, True))
    assert quick.memory_error == exact.memory_error == 0.0, "both traced"
    assert quick.peak_allocated_bytes == exact.peak_allocated_bytes
    assert quick.peak_reserved_bytes == exact.peak_reserved_bytes
    assert (quick.breakdown, quick.phase_peaks) == (exact.breakdown, exact.phase_peaks)
    assert quick.step_seconds == pytest.approx(exact.step_seconds, rel=1e-9)
