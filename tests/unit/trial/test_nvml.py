"""Which device CUDA will take as its first, known without starting CUDA."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from unit.trial.fake_nvml import (
    FakeCard,
    NVMLError,
    NVMLError_DriverNotLoaded,
    NVMLError_GpuIsLost,
    NVMLError_LibraryNotFound,
    NVMLError_NotSupported,
    install,
)

from autofit.core.errors import EnvironmentLacks
from autofit.core.units import MIB
from autofit.trial.machine import nvml

CARDS = ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"]
INSTANCES = {"GPU-cccc-3": ["MIG-dddd-4", "MIG-eeee-5"]}


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        (None, ["GPU-aaaa-1", "GPU-aabb-2", "MIG-dddd-4"]),
        ("", []),
        ("-1", []),
        ("0", ["GPU-aaaa-1"]),
        ("1,0", ["GPU-aabb-2", "GPU-aaaa-1"]),
        (" 1 , 0 ", ["GPU-aabb-2", "GPU-aaaa-1"]),
        ("1,-1,0", ["GPU-aabb-2"]),
        ("0,7,1", ["GPU-aaaa-1"]),
        ("7", []),
        ("1,1", []),
        ("NoDevFiles", []),
        ("GPU-aabb-2", ["GPU-aabb-2"]),
        ("GPU-aab", ["GPU-aabb-2"]),
        ("GPU-aa", []),
        ("GPU-ffff", []),
        ("GPU-aabb-2,GPU-aaaa-1", ["GPU-aabb-2", "GPU-aaaa-1"]),
        ("2", ["MIG-dddd-4"]),
        ("GPU-cccc-3", ["MIG-dddd-4"]),
        ("MIG-eeee-5", ["MIG-eeee-5"]),
        ("MIG-eeee-5,MIG-dddd-4", ["MIG-eeee-5", "MIG-dddd-4"]),
    ],
)
def test_visible_devices_are_those_that_cuda_takes(value: str | None, chosen: list[str]) -> None:
    assert nvml.visible_ids(value, CARDS, INSTANCES) == chosen


def test_memory_is_what_programs_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, FakeCard("GPU-a", used=3 * MIB), FakeCard("GPU-b"))
    machine = nvml.devices()
    assert machine is not None
    first = machine.visible[0]
    assert (first.marketed_bytes, first.memory_bytes, first.held_bytes) == (81559 * MIB, 81089 * MIB, 3 * MIB)
    assert (machine.driver, first.capability) == ("580.95.05", "9.0")
    assert fake.sessions == 0


def test_old_drivers_say_less(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeCard("GPU-a", knows_version_2=False, divided=None))
    first = nvml.visible(0)
    assert first is not None and first.memory_bytes == 81559 * MIB


def test_an_instance_of_a_divided_card_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = [None, FakeCard("MIG-b", name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", total=9984 * MIB, reserved=16 * MIB)]
    install(monkeypatch, FakeCard("GPU-a", divided=True, instances=slices))
    first = nvml.visible(0)
    assert first is not None
    assert (first.uuid, first.memory_bytes, first.capability) == ("MIG-b", 9968 * MIB, "9.0")
    assert first.name.endswith("MIG 1g.10gb")


def test_a_divided_card_whose_memory_is_not_to_be_asked_for_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that may use one instance (NVIDIA/nvidia-container-toolkit #842)."""
    slices: list[FakeCard | None] = [FakeCard("MIG-b", total=9984 * MIB, reserved=16 * MIB)]
    refused = NVMLError("Insufficient Permissions")
    install(monkeypatch, FakeCard("GPU-a", divided=True, instances=slices, memory_failure=refused))
    assert nvml.why_unreachable() is None
    assert slices[0] is not None
    slices[0].memory_failure = NVMLError_GpuIsLost("GPU is lost")
    assert nvml.why_unreachable() == "GPU is lost"


def test_a_card_with_the_hosts_memory_has_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GB10 answers (XuehaiPan/nvitop #208)."""
    holders = [SimpleNamespace(pid=1, usedGpuMemory=3 * MIB), SimpleNamespace(pid=2, usedGpuMemory=None)]
    state = {"nvmlDeviceGetComputeRunningProcesses": holders}
    install(monkeypatch, FakeCard("GPU-a", memory_failure=NVMLError_NotSupported("Not Supported"), state=state))
    first = nvml.visible(0)
    assert first is not None and first.held_bytes == 3 * MIB and nvml.shares_host()
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert (first.marketed_bytes, first.memory_bytes) == (whole, int(0.8 * whole)), "the host needs some of it"
    assert nvml.why_unreachable() is None


@pytest.mark.parametrize("failure", [NVMLError_LibraryNotFound("none"), NVMLError_DriverNotLoaded("none")])
def test_no_driver_is_no_device(monkeypatch: pytest.MonkeyPatch, failure: NVMLError) -> None:
    install(monkeypatch, failure=failure)
    assert nvml.devices() is None and nvml.visible(0) is None
    assert nvml.is_not_loaded() == isinstance(failure, NVMLError_DriverNotLoaded)


def test_a_driver_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, failure=NVMLError("Driver/library version mismatch"))
    with pytest.raises(EnvironmentLacks, match=r"version mismatch.*nvidia-smi"):
        nvml.devices()
    assert nvml.visible(0) is None
