"""precision=tf32: fp32, with products rounded to TF32 by tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from autofit.core.device.hardware import Hardware
from autofit.estimate.assumptions import of_trace
from autofit.estimate.estimator import Estimator
from autofit.estimate.time.guessed_rates import prior, tf32_speedup
from autofit.prediction.estimation import site as catalog_site
from autofit.techniques import complete, unsupported
from tests.tiny import CPU_HARDWARE, CUDA_HARDWARE, LLAMA, built, config, job, model

T4 = replace(CUDA_HARDWARE, name="t4", capability="7.5", bf16=False)
MI300X = replace(CUDA_HARDWARE, name="mi300x", device_name="AMD Instinct MI300X", capability="gfx942")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")  # torch's default


def test_each_build_says_how_fp32_products_are_rounded() -> None:
    built(config(precision="tf32"), LLAMA)
    assert torch.get_float32_matmul_precision() == "high" and torch.backends.cuda.matmul.allow_tf32
    built(config(precision="fp32"), LLAMA)
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize(
    ("hardware", "has"), [(CUDA_HARDWARE, True), (T4, False), (MI300X, False), (CPU_HARDWARE, False)]
)
def test_only_nvidias_tensor_cores_from_ampere_on_have_it(hardware: Hardware, has: bool) -> None:
    reason = unsupported(complete({"precision": "tf32"}), job(hardware=hardware))
    needed = "precision=tf32 needs an NVIDIA GPU of compute capability 8.0 or higher"
    assert reason == (None if has else f"{needed}, not {hardware.name}")


@pytest.mark.parametrize("values", [{"method": "full"}, {"method": "lora", "checkpointing": "full"}], ids=str)
def test_it_takes_the_memory_of_fp32_and_less_time(values: dict[str, str]) -> None:
    h100 = catalog_site("h100-80g")[0]
    wide_enough = model("llama", hidden_size=2048, intermediate_size=8192)  # for products to outlast their launches
    h100_job = job(wide_enough, hardware=h100, seq_len=2048)
    wide, rounded = (
        Estimator(h100_job, prior(h100)).estimate(
            complete({**values, "precision": p}), memory_limit_bytes=h100.memory_bytes
        )
        for p in ("fp32", "tf32")
    )
    same = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "breakdown", "phase_peaks")
    assert {name: getattr(rounded, name) for name in same} == {name: getattr(wide, name) for name in same}
    assert rounded.config["precision"] == "tf32"
    assert rounded.tokens_per_second and wide.tokens_per_second
    assert rounded.tokens_per_second > wide.tokens_per_second


def test_an_estimate_says_that_no_probe_measured_it() -> None:
    of, h100 = complete({"precision": "tf32"}), catalog_site("h100-80g")[0]
    lines = [line for line in of_trace(of, job(hardware=h100)) if "TF32" in line]
    times = f"{tf32_speedup(h100):.3g} times as fast as in fp32, by the data sheet"
    assert lines == [f"products in TF32 are taken to be {times}: no probe measures them"]
    unknown = replace(CUDA_HARDWARE, name="a-card-of-tomorrow")
    assert any("no faster than in fp32" in line for line in of_trace(of, job(hardware=unknown)))


def test_products_are_faster_by_the_data_sheet() -> None:
    a100, unknown = catalog_site("a100-80g")[0], replace(CUDA_HARDWARE, name="a-card-of-tomorrow")
    assert tf32_speedup(a100) == 156e12 / 19.5e12
    assert tf32_speedup(unknown) == 1.0
    a100_job = job(hardware=a100)
    (costs, *_) = Estimator(a100_job, None).trace(complete({"precision": "fp32"})).costs
    faster = costs.faster_products(8.0)
    assert 0 < faster.flops.sum() < costs.flops.sum() and (faster.bytes == costs.bytes).all()
    (sixteen, *_) = Estimator(a100_job, None).trace(complete({"precision": "bf16"})).costs
    assert (sixteen.faster_products(8.0).flops == sixteen.flops).all()
