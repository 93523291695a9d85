"""Arithmetic of a step, against counts by hand and by torch's own counter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from autofit.catalog.models import Model, load, shape
from autofit.training.flops import flops_per_token, mfu
from tests.tiny import CUDA_HARDWARE, GEMMA2, LLAMA, LLAMA_TIED, built, config, job, rows


@pytest.mark.parametrize(
    ("model", "attended"),
    [(LLAMA, 16.0), (LLAMA_TIED, 16.0), (GEMMA2, (16 + 7) / 2)],  # of 32, and of a window of 8
    ids=["untied", "tied", "gemma2"],
)
def test_a_full_step_costs_what_torch_counts(model: Model, attended: float) -> None:
    seq_len = 32
    step = built(config(precision="fp32", micro_batch=2, attention="eager"), model, seq_len=seq_len)
    with FlopCounterMode(display=False) as counter:
        step.run(rows(2, seq_len=seq_len))
    counted = counter.get_total_flops() / (2 * seq_len)
    shaped = shape(model)
    # Eager attention computes what is masked, too, which the formula leaves out; the angles of rotary positions are one
    # more small product.
    masked = 12.0 * shaped.attention_width * shaped.layers * (seq_len - attended)
    assert counted == pytest.approx(flops_per_token(shaped, lengths=(seq_len,), full=True) + masked, rel=0.01)


def test_llama_8b_costs_six_flops_per_weight_and_attention() -> None:
    shaped = shape(load("llama-3.1-8b"))
    matmul = 8_030_261_248 - 128_256 * 4096 - (2 * 32 + 1) * 4096
    assert shaped.active_matmul_parameters == matmul
    attention = 12 * 32 * 4096 * 2048 / 2
    assert flops_per_token(shaped, lengths=(2048,), full=True) == 6 * matmul + attention
    assert flops_per_token(shaped, lengths=(2048,), full=False) == 4 * matmul + attention


def test_a_window_bounds_what_a_token_attends_to() -> None:
    shaped = shape(load("gemma-3-1b"))  # 4 layers see everything, 22 the last 512 tokens
    products = 6 * shaped.active_matmul_parameters
    within, beyond = (flops_per_token(shaped, lengths=(n,), full=True) - products for n in (512, 2048))
    assert within == 12 * 1024 * 26 * 256
    by_hand = sum(min(position, 512) for position in range(2048)) / 2048
    assert beyond == pytest.approx(12 * 1024 * (4 * 1024 + 22 * by_hand), rel=1e-3)
    both = flops_per_token(shaped, lengths=(512, 2048), full=True) - products
    assert both == pytest.approx((512 * within + 2048 * beyond) / 2560)


def test_utilisation_is_the_share_of_the_peak_and_unknown_without_one() -> None:
    cuda_job = job(LLAMA, hardware=CUDA_HARDWARE)
    needed = flops_per_token(shape(LLAMA), lengths=(16,), full=True)
    assert mfu(cuda_job, config(), 989e12 / needed) == pytest.approx(1.0)
    assert mfu(cuda_job, config(), 0.4 * 989e12 / needed) == pytest.approx(0.4)
    two = replace(cuda_job, workload=replace(cuda_job.workload, devices=2))
    assert mfu(two, config(), 989e12 / needed) == pytest.approx(0.5)
    assert mfu(job(LLAMA), config(), 1000.0) is None


def test_adapters_save_the_gradients_of_frozen_weights() -> None:
    cuda_job = job(LLAMA, hardware=CUDA_HARDWARE)
    full, lora = mfu(cuda_job, config(), 1e6), mfu(cuda_job, config(method="lora"), 1e6)
    assert full is not None and lora is not None
    assert 4 / 6 < lora / full < 1
