"""What a meter shows is what the driver shows, and the limit binds it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import cast

import pytest
import torch
from unit.trial.fake_cuda import CONTEXT, TOTAL, install_cuda
from unit.trial.fake_nvml import FakeCard

from autofit.core.units import GIB, MIB
from autofit.trial.machine import nvml
from autofit.trial.measure.meter import CpuMeter, CudaMeter, meter_for
from autofit.trial.process.classify import DeviceBusy, OverLimit


def test_context_is_this_process_own(monkeypatch: pytest.MonkeyPatch) -> None:
    install_cuda(monkeypatch, others=5000 * MIB)
    assert CudaMeter().context == CONTEXT


def test_context_is_read_from_the_visible_card(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_cuda(monkeypatch)
    busy = FakeCard("GPU-busy", used=70000 * MIB)
    sys.modules["pynvml"].cards = (busy, fake.card)  # type: ignore[attr-defined]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    meter = CudaMeter()
    meter.enforce(TOTAL)
    assert meter.context == CONTEXT


def test_limit_leaves_room_for_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_cuda(monkeypatch)
    CudaMeter().enforce(8 * GIB)
    assert fake.allowed() == pytest.approx(8 * GIB - CONTEXT, abs=1)


def test_a_device_with_the_hosts_memory_never_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_cuda(monkeypatch)
    usual = nvml.visible(0)
    assert usual is not None
    shared = replace(usual, memory_bytes=20_000 * MIB, shares_host=True)
    monkeypatch.setattr(nvml, "visible", lambda number: shared)
    meter = CudaMeter()
    meter.enforce(TOTAL)
    assert fake.allowed() == pytest.approx(20_000 * MIB - meter.context)
    fake.use(allocated=TOTAL - CONTEXT)
    with pytest.raises(OverLimit):
        meter.reading()


def test_what_a_program_has_used_before_its_meter_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_cuda(monkeypatch, others=1000 * MIB)
    fake.start()
    fake.use(allocated=16 * GIB)
    monkeypatch.setattr(fake, "start", lambda: None)  # it has started
    with pytest.raises(DeviceBusy):
        CudaMeter().enforce(TOTAL - 1000 * MIB)
    meter = meter_for("cuda", 1000 * MIB, whole=True)
    meter.enforce(TOTAL - 1000 * MIB)
    assert meter.reading().device_bytes == 16 * GIB + CONTEXT
    meter.enforce(8 * GIB)
    assert fake.allowed() == pytest.approx(8 * GIB - CONTEXT, abs=1)


def test_a_whole_process_counts_its_imports() -> None:
    code = """
from autofit.trial.measure.meter import CpuMeter
whole, beyond = CpuMeter(whole=True).reading().device_bytes, CpuMeter().reading().device_bytes
assert whole > 50 * 2**20 > beyond, (whole, beyond)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_limit_below_the_context_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_cuda(monkeypatch)
    CudaMeter().enforce(MIB)
    assert fake.allowed() == 0


def test_kernels_loaded_late_count(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_cuda(monkeypatch)
    meter = CudaMeter()
    meter.enforce(8 * GIB)
    fake.use(allocated=3 * GIB, reserved=4 * GIB)
    fake.load_kernels(300 * MIB)
    reading = meter.reading()
    assert (reading.peak_allocated_bytes, reading.peak_reserved_bytes) == (3 * GIB, 4 * GIB)
    assert reading.device_bytes == fake.card.used == 4 * GIB + CONTEXT + 300 * MIB


def test_over_the_limit_by_late_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_cuda(monkeypatch)
    meter = CudaMeter()
    meter.enforce(8 * GIB)
    fake.use(allocated=fake.allowed())
    meter.reading()
    fake.load_kernels(300 * MIB)
    with pytest.raises(OverLimit, match=r"8\.29 GiB of 8\.00 GiB"):
        meter.reading()


def test_reset_forgets_the_set_up_and_binds_the_grown_context(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_cuda(monkeypatch)
    meter = CudaMeter()
    meter.enforce(8 * GIB)
    fake.use(allocated=6 * GIB)
    fake.use(allocated=1 * GIB)
    fake.load_kernels(200 * MIB)
    meter.reset()
    assert fake.allowed() == pytest.approx(8 * GIB - CONTEXT - 200 * MIB, abs=1)
    with meter.phase("forward"):
        fake.use(allocated=2 * GIB)
    reading = meter.reading()
    assert reading.setup_peak_bytes == 6 * GIB + CONTEXT + 200 * MIB
    assert (reading.peak_allocated_bytes, reading.peak_reserved_bytes) == (2 * GIB, 2 * GIB)
    assert reading.phase_peaks == {"forward": 2 * GIB, "backward": 0, "optimizer": 0}


def test_a_number_is_read_in_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_cuda(monkeypatch)
    meter = CudaMeter()
    read_in: list[object] = []

    class Loss:
        def __float__(self) -> float:
            read_in.append(fake.stream)
            return 3.0

    assert meter.scalar(cast(torch.Tensor, Loss())) == 3.0
    assert read_in == [meter._reader] and fake.stream is None, "the steps' own stream is current again"


@pytest.mark.parametrize("resident", [0, 1 * GIB, 3 * GIB])
def test_paged_states_count_wherever_they_are(monkeypatch: pytest.MonkeyPatch, resident: int) -> None:
    fake = install_cuda(monkeypatch)
    meter = CudaMeter()
    meter.enforce(8 * GIB)
    fake.use(allocated=4 * GIB)
    fake.page(monkeypatch, 3 * GIB, resident=resident)
    assert meter.reading().device_bytes == 7 * GIB + CONTEXT
    fake.use(allocated=6 * GIB)
    with pytest.raises(OverLimit, match=r"3\.00 GiB paged"):
        meter.reading()


def test_a_full_card_pages_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_cuda(monkeypatch)
    meter = CudaMeter()
    meter.enforce(TOTAL)
    fake.use(allocated=20 * GIB)
    fake.page(monkeypatch, 16 * GIB, resident=2 * GIB)
    assert meter.reading().device_bytes == TOTAL


def test_memory_of_others_is_not_the_configs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    install_cuda(monkeypatch, others=5000 * MIB)
    meter = CudaMeter()
    meter.enforce(18 * GIB)
    with pytest.raises(DeviceBusy, match=r"hold 4\.88 GiB.*--memory-limit 19000MiB"):
        meter.enforce(TOTAL)


def test_a_display_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_cuda(monkeypatch, others=100 * MIB)
    meter = CudaMeter()
    meter.enforce(TOTAL)
    assert fake.fraction == 1.0, "the driver itself refuses more than the device has"


@pytest.mark.parametrize("there", [True, False])
def test_expandable_segments_are_those_that_the_allocator_has(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    fake = install_cuda(monkeypatch)
    fake.expandable = there  # not on every platform that torch calls cuda, though every trial asks for them
    assert CudaMeter().expandable_segments() is there


def test_others_that_come_meanwhile_spoil_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_cuda(monkeypatch)
    meter = CudaMeter()
    meter.enforce(8 * GIB)
    fake.others_take(10 * GIB)
    with pytest.raises(DeviceBusy, match=r"took 10\.00 GiB"):
        meter.reading()


def test_without_nvml_the_device_is_taken_for_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_cuda(monkeypatch, nvml=False)
    meter = CudaMeter()
    meter.enforce(TOTAL)
    assert meter.context == CONTEXT
    fake.load_kernels(100 * MIB)
    assert meter.reading().device_bytes == 2 * MIB + CONTEXT + 100 * MIB


def test_the_hosts_set_up_is_kept_apart() -> None:
    code = """
import torch
from autofit.trial.measure.meter import CpuMeter
meter = CpuMeter()
before = meter.reading()
torch.ones(64 * 1024**2)
meter.reset()
with meter.phase("forward"):
    torch.ones(16 * 1024**2)
after = meter.reading()
print(before.setup_peak_bytes, after.setup_peak_bytes, after.device_bytes, after.phase_peaks["forward"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, setup, device, forward = (int(word) for word in done.stdout.split())
    assert before == 0
    assert setup == pytest.approx(256 * MIB, rel=0.05)
    assert device == forward == pytest.approx(64 * MIB, rel=0.1)


def test_the_hosts_freed_heap_goes_back() -> None:
    meter = CpuMeter()
    kept = [torch.ones(1024) for _ in range(20_000)]  # small enough for the heap, which does not shrink by itself
    full = meter.in_use()
    del kept
    meter.reset()
    assert meter.in_use() < full - 40 * MIB
