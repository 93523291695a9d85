"""One trace at primes is a trace at every micro-batch and rank."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from test_trace import MIXTURE
from tiny import CUDA_HARDWARE, LLAMA

from autofit.catalog.models import Model
from autofit.estimate.kernels.cuda_kernels import cuda_scratch
from autofit.estimate.memory.symbolic_sizes import MICRO_BATCH, RANK, SymbolicSizes, joined
from autofit.estimate.tracing import trace
from autofit.techniques import complete, parse


def test_sizes_are_read_off_by_what_divides_them() -> None:
    amounts = SymbolicSizes.of([12, 3 * MICRO_BATCH, 5 * RANK, 7 * MICRO_BATCH * RANK, 0])
    assert amounts.at(2, 10).tolist() == [12, 6, 50, 140, 0]
    assert joined([amounts, SymbolicSizes.constant([MICRO_BATCH])]).at(2, 10)[-1] == MICRO_BATCH


def test_both_are_primes() -> None:
    for number in (MICRO_BATCH, RANK):
        assert all(number % divisor for divisor in range(2, int(number**0.5) + 1))


@pytest.mark.parametrize(
    ("of", "text"),
    [
        (LLAMA, "method=full,precision=bf16,checkpointing=none,micro_batch=1"),
        (LLAMA, "method=full,precision=bf16,checkpointing=none,micro_batch=2"),
        (LLAMA, "method=full,precision=fp32,checkpointing=selective,attention=eager,micro_batch=1"),
        (LLAMA, "method=full,precision=fp32,checkpointing=selective,attention=eager,micro_batch=3"),
        (LLAMA, "method=lora,precision=bf16-mixed,checkpointing=full,rank=16,micro_batch=2"),
        (LLAMA, "method=qlora,precision=bf16,checkpointing=every-2,rank=64,micro_batch=3"),
        (MIXTURE, "method=full,precision=bf16,checkpointing=none,micro_batch=3"),
        (MIXTURE, "method=lora,precision=bf16,checkpointing=full,rank=8,micro_batch=1"),
    ],
)
def test_a_trace_at_the_primes_has_the_sizes_of_a_trace_at_the_numbers_themselves(
    of: Model, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = complete(parse(text))
    job = tiny.job(of, hardware=CUDA_HARDWARE, seq_len=32, global_batch=12)
    rank = int(config.get("rank") or 1)
    at_primes, _ = trace.trace_decoder(config, job, (0, 1, 2), cuda_scratch)
    micro_batch = config.number("micro_batch")
    monkeypatch.setattr(trace, "MICRO_BATCH", micro_batch)
    monkeypatch.setattr(trace, "RANK", rank)
    directly, _ = trace.trace_decoder(config, job, (0, 1, 2), cuda_scratch)
    sizes = SymbolicSizes.of(s.bytes for s in at_primes.storages).at(micro_batch, rank)
    assert sizes.tolist() == [s.bytes for s in directly.storages]
    # What is freed at one place together, as autocast's copies are, has no order.
    assert [(s.allocated, s.freed) for s in at_primes.storages] == [(s.allocated, s.freed) for s in directly.storages]
    for place, works in at_primes.work.items():
        flops = SymbolicSizes.of(w.flops for w in works).at(micro_batch, rank)
        assert np.array_equal(flops, [w.flops for w in directly.work[place]])
