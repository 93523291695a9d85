"""Estimates of a whole lattice: parts that add up, and what they borrow from each other instead of replaying it."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
from tiny import CUDA_HARDWARE, STACK, model

from autofit.catalog.space import load
from autofit.core.lattice import Config
from autofit.core.units import GIB
from autofit.estimate import sweep as sweeping
from autofit.estimate.estimator import Estimator
from autofit.estimate.footprint import Footprint
from autofit.estimate.memory.replays import Fragmentation
from autofit.techniques import AXES, Job, complete, parse, unsupported
from autofit.techniques.axes.kernels import by_liger

LIMIT, BATCH = 24 * GIB, 64
MODEL = model(
    "llama", num_hidden_layers=4, hidden_size=2048, intermediate_size=5632, num_attention_heads=16,
    num_key_value_heads=4, head_dim=128, vocab_size=32000, max_position_embeddings=2048, tie_word_embeddings=False,
)  # fmt: skip
"""Small in depth alone: a card holds some of its configs, and its blocks are as large as those of actual models."""
DECODERS, CONFIGS = 6, 100


@pytest.fixture(scope="module")
def job() -> Job:
    stack = replace(STACK, liger_kernel="0.8.5", flash_attn="2.8.3", deepspeed="0.19.8")
    return tiny.job(MODEL, hardware=CUDA_HARDWARE, stack=stack, seq_len=2048, global_batch=BATCH)


@pytest.fixture(scope="module")
def sample(job: Job) -> list[Config]:
    """Configs of a space in its order, of a few decoders as each must be traced."""
    space = load("single-gpu", AXES).configs(AXES, batch=BATCH)
    possible = [c for c in space if unsupported(c, job) is None]
    return [c for liger in (False, True) for c in drawn([c for c in possible if by_liger(c) is liger])]


def drawn(every: list[Config]) -> list[Config]:
    chance = random.Random(0)
    decoders = {c: c.without("optimizer", "micro_batch", "rank", "loss", "compile") for c in every}
    wanted = set(chance.sample(sorted(set(decoders.values()), key=str), DECODERS))
    chosen = set(chance.sample([c for c in every if decoders[c] in wanted], CONFIGS))
    return [c for c in every if c in chosen]


@pytest.fixture(scope="module")
def estimates(job: Job, sample: list[Config]) -> list[tuple[Footprint, Footprint]]:
    """Of each config, as in a sweep and by itself."""
    estimator = Estimator(job, None)
    swept = [estimator.footprint(c, memory_limit_bytes=LIMIT, replayed=False) for c in sample]
    alone = [estimator.footprint(c, memory_limit_bytes=LIMIT) for c in sample]
    return list(zip(swept, alone, strict=True))


def check_sums(estimate: Footprint) -> None:
    assert sum(estimate.breakdown.values()) == estimate.device_bytes
    assert min(estimate.breakdown.values()) >= 0
    assert estimate.peak_allocated_bytes <= estimate.peak_reserved_bytes <= estimate.device_bytes
    assert max(estimate.phase_peaks.values()) == estimate.peak_allocated_bytes


def test_what_is_alive_adds_up_to_what_the_driver_would_show(estimates: list[tuple[Footprint, Footprint]]) -> None:
    assert len(estimates) == 2 * CONFIGS
    for estimate in (e for both in estimates for e in both):
        check_sums(estimate)
        assert estimate.peak_reserved_bytes < estimate.device_bytes, "the context"


def test_a_cap_counts_paged_states_which_the_allocator_does_not_hold(job: Job) -> None:
    """The allocator gives back what it keeps and is within the cap, and the states beside it are not."""
    config = complete(parse("method=full,precision=bf16-mixed,micro_batch=64,checkpointing=full,loss=fused"))
    estimate = Estimator(job, None).footprint(config.replace(optimizer="paged-adamw-8bit"), memory_limit_bytes=LIMIT)
    check_sums(estimate)
    assert not estimate.fits_device
    assert estimate.peak_reserved_bytes <= LIMIT < estimate.device_bytes


@pytest.mark.parametrize("liger", [False, True], ids=["torch", "liger"])
def test_borrowed_fragmentation_is_nearly_ones_own(estimates: list[tuple[Footprint, Footprint]], liger: bool) -> None:
    estimates = [pair for pair in estimates if by_liger(pair[0].config) is liger]
    assert [swept.fits_device for swept, _ in estimates] == [alone.fits_device for _, alone in estimates]
    errors = {
        fits: [abs(swept.device_bytes / own.device_bytes - 1.0) for swept, own in estimates if own.fits_device is fits]
        for fits in (True, False)
    }
    assert min(map(len, errors.values())) > 10
    assert sum(error > 0.0 for error in errors[True]) > 30, "many borrow"
    assert statistics.median(errors[True]) < 0.005
    assert liger or statistics.quantiles(errors[True], n=20)[-1] < 0.03
    assert max(map(max, errors.values())) < Fragmentation(share=None, by_liger=liger).error
    for swept, alone in estimates:
        assert alone.peak_reserved_bytes <= swept.peak_reserved_bytes * (1.0 + swept.borrowed_error)


def test_what_would_be_begun_too_late_is_left_out(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock is looked at once for the limit, and once before each config."""
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(sweeping, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    configs = [complete(parse(f"method=lora,micro_batch={size}")) for size in (1, 2, 4, 8)]
    reported: list[int] = []
    estimates = sweeping.sweep(job, configs, memory_limit_bytes=LIMIT, report=reported.append, seconds=25.0)
    assert list(estimates) == configs[:2] and reported == [1, 2]
    assert "2 of 4 configs are left unpredicted" in caplog.text


def test_no_process_begins_a_config_too_late(job: Job) -> None:
    many = [
        complete(parse(f"method={method},micro_batch={size},loss={loss},optimizer={optimizer}"))
        for method in ("lora", "full")
        for size in (1, 2, 4, 8)
        for loss in ("chunked", "full")
        for optimizer in ("adamw", "sgd")
    ]
    assert sweeping.workers_for(many, 2) == 2
    assert sweeping.sweep(job, many, memory_limit_bytes=LIMIT, processes=2, seconds=0.0) == {}


def test_if_time_runs_out_something_of_every_method_is_known() -> None:
    formats = {"full": ("bf16", "bf16-mixed", "fp32"), "lora": ("bf16", "fp32"), "qlora": ("bf16",)}
    many = [
        complete(parse(f"method={method},precision={precision},micro_batch={size}"))
        for method, precisions in formats.items()
        for precision in precisions
        for size in (1, 2)
    ]
    groups = sweeping.groups_of(many)
    assert [group[0]["method"] for group in groups] == ["full", "lora", "qlora", "full", "lora", "full"]
    assert {config for group in groups for config in group} == set(many)
