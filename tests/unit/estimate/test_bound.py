"""Memory by formula: how far it is from the trace where there is one, and what it says where there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from tiny import CPU_HARDWARE, CUDA_HARDWARE, STACK

from autofit.catalog.models import load
from autofit.core.device.hardware import Hardware
from autofit.core.units import GIB
from autofit.estimate.assumptions import assumptions
from autofit.estimate.bound import bounded
from autofit.estimate.estimator import Estimator
from autofit.estimate.footprint import MEMORY_ERROR
from autofit.estimate.memory.memory_trace import MemoryTrace
from autofit.estimate.sweep import sweep
from autofit.estimate.tracing import traces
from autofit.estimate.tracing.recorder import NotTraced
from autofit.techniques import Job, complete, parse


def job(name: str, hardware: Hardware = CUDA_HARDWARE) -> Job:
    stack = replace(STACK, deepspeed="installed")
    return tiny.job(load(name), hardware=hardware, stack=stack, seq_len=2048, global_batch=8)


DENSE = [
    "method=full,precision=bf16,checkpointing=none,micro_batch=2",
    "method=full,precision=bf16,checkpointing=full,micro_batch=4",
    "method=lora,precision=bf16,checkpointing=none,micro_batch=2",
    "method=qlora,precision=bf16,checkpointing=full,micro_batch=4",
]
KEEPING_SCORES = [
    "method=lora,precision=bf16,checkpointing=none,micro_batch=2,attention=eager",
    "method=lora,precision=bf16,checkpointing=full,micro_batch=4,attention=eager",
    "method=lora,precision=fp32,checkpointing=none,micro_batch=2",  # fused only for heads that share no key
]
EXPERTS = ["method=lora,precision=bf16,checkpointing=none,micro_batch=2", DENSE[0]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("llama-3.1-8b", text) for text in DENSE),
        *(("smollm2-360m", text) for text in KEEPING_SCORES[::2]),
        *(("pythia-160m", text) for text in KEEPING_SCORES[1:]),
        *(("qwen3-30b-a3b", text) for text in EXPERTS),
    ],
)
def test_the_formula_errs_by_no_more_than_it_says(name: str, text: str) -> None:
    config, of = complete(parse(text)), job(name)
    traced = Estimator(of, None).estimate(config, memory_limit_bytes=80 * GIB)
    formula = bounded(config, of, memory_limit_bytes=80 * GIB, reason="a test")
    assert formula.device_bytes == sum(formula.breakdown.values())
    assert traced.device_bytes == pytest.approx(formula.device_bytes, rel=MEMORY_ERROR)


def test_what_cannot_be_followed_is_estimated_by_formula_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fails(*arguments: object, **options: object) -> None:
        tried.append(arguments)
        raise ValueError("the data decides")

    monkeypatch.setattr(traces, "trace_decoder", fails)
    estimator = Estimator(job("smollm2-360m"), None)
    config = complete(parse("method=full,precision=bf16,micro_batch=1"))
    with pytest.raises(NotTraced, match="the data decides"):
        estimator.trace(config)
    found = estimator.estimate(config, memory_limit_bytes=80 * GIB)
    assert found.memory_error == MEMORY_ERROR
    assert "ValueError: the data decides" in found.assumptions[0]
    assert found.tokens_per_second is None
    limit = int(found.device_bytes * (1 + MEMORY_ERROR / 2))
    assert not estimator.estimate(config, memory_limit_bytes=limit).fits
    assert len(tried) == 1


@pytest.mark.parametrize("part", ["loss", "updates"])
def test_a_loss_or_an_optimizer_that_cannot_be_followed_costs_its_own_configs_their_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str
) -> None:
    monkeypatch.setenv("AUTOFIT_CACHE", str(tmp_path))  # nothing is known from an earlier trace
    trace = getattr(traces, f"trace_{part}")
    tried = []

    def fails_once(*arguments: object, **options: object) -> MemoryTrace:
        tried.append(arguments)
        if len(tried) == 1:
            raise IndexError(f"the {part} cannot be followed")
        return trace(*arguments, **options)

    monkeypatch.setattr(traces, f"trace_{part}", fails_once)
    common = "method=full,precision=bf16,checkpointing=full,micro_batch="
    configs = [complete(parse(common + more)) for more in ("1", "1,compile=true", "2,loss=chunked,optimizer=sgd")]
    of = job("smollm2-135m")
    found = sweep(of, configs, memory_limit_bytes=80 * GIB)
    assert [found[config].memory_error for config in configs] == [MEMORY_ERROR, MEMORY_ERROR, 0.0]
    assert f"IndexError: the {part} cannot be followed" in assumptions(found[configs[0]], of)[0]
    assert len(tried) == 2


@pytest.mark.parametrize(
    ("text", "close"),
    [
        ("method=full,offload=optimizer", 0.01),
        ("method=full,offload=params", 0.01),
        ("method=full,precision=bf16,offload=optimizer", 0.01),
        ("method=lora,rank=8,offload=params", 0.2),  # adapters are left out
        ("method=full,precision=bf16,checkpointing=offload", 0.1),  # blocks of pinned memory are powers of two
    ],
)
def test_the_formula_knows_what_the_host_holds(text: str, close: float) -> None:
    config, of = complete(parse(f"{text},micro_batch=1")), job("smollm2-360m")
    traced = Estimator(of, None).estimate(config, memory_limit_bytes=80 * GIB)
    formula = bounded(config, of, memory_limit_bytes=80 * GIB, reason="a test")
    assert formula.host_bytes == pytest.approx(traced.host_bytes, rel=close)
    assert sum(formula.breakdown.values()) == formula.device_bytes


def test_what_a_processor_offloads_goes_to_the_memory_it_came_from() -> None:
    for text in ("method=full,precision=bf16", "method=full,precision=bf16,offload=optimizer"):
        config, of = complete(parse(f"{text},micro_batch=1")), job("smollm2-360m", CPU_HARDWARE)
        traced = Estimator(of, None).estimate(config, memory_limit_bytes=80 * GIB)
        formula = bounded(config, of, memory_limit_bytes=80 * GIB, reason="a test")
        assert formula.host_bytes == formula.device_bytes == sum(formula.breakdown.values())
        assert formula.host_bytes == pytest.approx(traced.host_bytes, rel=MEMORY_ERROR)


def test_a_host_that_is_too_small_rules_out_what_cannot_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise ValueError("the data decides")

    monkeypatch.setattr(traces, "trace_decoder", fails)
    config = complete(parse("method=full,offload=optimizer,micro_batch=1"))
    hosts = [replace(CUDA_HARDWARE, count=1, host_memory_bytes=size) for size in (4 * GIB, 64 * GIB)]
    small, large = (
        Estimator(job("smollm2-360m", host), None).estimate(config, memory_limit_bytes=80 * GIB) for host in hosts
    )
    assert small.memory_error == MEMORY_ERROR and small.fits_device
    assert not small.fits and small.host_short_bytes == small.host_bytes - 4 * GIB
    assert large.fits
