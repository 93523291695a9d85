"""What a machine is taken for, with devices that are not there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from unit.trial.fake_nvml import FakeCard, NVMLError_LibraryNotFound, install

from autofit.catalog.hardware import card, card_of
from autofit.core.device.hardware import Hardware
from autofit.core.errors import EnvironmentLacks
from autofit.core.units import KIB, MIB
from autofit.core.workload import digest
from autofit.trial.machine import detection, instructions
from autofit.trial.machine.cores import threads_per_rank
from autofit.trial.machine.detection import check_devices, cpu, detect
from autofit.trial.measure import process_memory


@pytest.fixture
def cuda_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the installed torch were built for CUDA."""
    built = detection._TorchBuild(version="2.13.0", cuda="13.0", hip=None)
    monkeypatch.setattr(detection, "_torch_build", lambda: built)


@pytest.mark.usefixtures("cuda_torch")
def test_a_card_of_the_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeCard("GPU-a"), FakeCard("GPU-b"))
    hardware, stack = detect()
    assert (hardware.name, hardware.kind, hardware.count, hardware.capability) == ("h100-80g", "cuda", 2, "9.0")
    assert hardware.memory_bytes == 81089 * MIB
    assert (stack.cuda, stack.driver) == ("13.0", "580.95.05")


@pytest.mark.usefixtures("cuda_torch")
@pytest.mark.parametrize(("limit", "name"), [(500_000, "h100-80g-500w"), (700_000, "h100-80g"), (None, "h100-80g")])
def test_another_power_limit_is_another_device(monkeypatch: pytest.MonkeyPatch, limit: int | None, name: str) -> None:
    install(monkeypatch, FakeCard("GPU-a", power_limit=limit))
    hardware, _ = detect()
    usual = replace(hardware, name="h100-80g", power_limit_watts=None)
    assert hardware.name == name and (hardware.key == usual.key) == (name == "h100-80g")
    assert card_of(hardware.name) == card("h100-80g")


@pytest.mark.usefixtures("cuda_torch")
def test_hidden_cards_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeCard("GPU-a"), FakeCard("GPU-b", name="NVIDIA L4", total=23034 * MIB, capability=(8, 9)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    hardware, _ = detect()
    assert (hardware.name, hardware.count) == ("l4", 1)


@pytest.mark.usefixtures("cuda_torch")
@pytest.mark.parametrize("value", ["", "-1", "5"])
def test_all_cards_hidden(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    install(monkeypatch, FakeCard("GPU-a"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert detect("auto")[0].kind == "cpu"
    with pytest.raises(EnvironmentLacks, match=f"CUDA_VISIBLE_DEVICES='{value}'"):
        detect("cuda")


@pytest.mark.usefixtures("cuda_torch")
def test_of_cards_that_differ_the_one_that_is_used_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA numbers cards by their speed, NVML by their place."""
    detection._warn.cache_clear()
    install(monkeypatch, FakeCard("GPU-a", name="NVIDIA T4"), FakeCard("GPU-b"))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    detect()
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,GPU-a")
    detect()
    assert not caplog.records
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    detect()
    (record,) = caplog.records
    assert "NVIDIA T4 is used" in record.getMessage() and "such as GPU-b for NVIDIA H100" in record.getMessage()


@pytest.mark.usefixtures("cuda_torch")
def test_a_card_whose_driver_cannot_be_asked_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, failure=NVMLError_LibraryNotFound("none"))
    assert detect()[0].kind == "cpu"
    monkeypatch.setattr(detection, "NVIDIA_NODES", [tmp_path])
    with pytest.raises(EnvironmentLacks, match=r"libnvidia-ml.*NVIDIA_DRIVER_CAPABILITIES=compute,utility"):
        detect()
    assert detect("cpu")[0].kind == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect()[0].kind == "cpu"


@pytest.mark.usefixtures("cuda_torch")
def test_a_slice_is_not_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    slices: list[FakeCard | None] = [FakeCard("MIG-b", name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", total=9984 * MIB)]
    install(monkeypatch, FakeCard("GPU-a", divided=True, instances=slices))
    hardware, _ = detect()
    assert hardware.name == "nvidia-h100-80gb-hbm3-mig-1g-10gb-10g"
    assert hardware.memory_bytes < 10 * 1024 * MIB and hardware.peak_flops is None
    assert hardware.mig_profile == "1g.10gb"


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_torch_without_cuda_beside_a_card(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    install(monkeypatch, FakeCard("GPU-a"))
    built = detection._TorchBuild(version="2.13.0+cpu", cuda=None, hip=None)
    monkeypatch.setattr(detection, "_torch_build", lambda: built)
    with pytest.raises(
        EnvironmentLacks, match=r"H100.*2\.13\.0\+cpu is not built for CUDA \(make install TORCH_INDEX="
    ):
        detect(device)
    assert detect("cpu")[0].kind == "cpu"


@pytest.mark.usefixtures("cuda_torch")
def test_the_key_survives_a_driver_that_keeps_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for reserved in (470 * MIB, 551 * MIB):
        install(monkeypatch, FakeCard("GPU-a", reserved=reserved))
        keys.add(detect()[0].key)
    assert len(keys) == 1


@pytest.mark.usefixtures("cuda_torch")
def test_unknown_cards_of_one_name_differ_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for total in (10240 * MIB, 12288 * MIB):
        card = FakeCard("GPU-a", name="NVIDIA GeForce RTX 3080", total=total, capability=(8, 6))
        install(monkeypatch, card)
        hardware, _ = detect()
        keys.add(hardware.key)
        assert hardware.bf16
    assert len(keys) == 2


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    code = (
        "import sys; from autofit.trial.machine.detection import _torch_build as build; "
        "print(build()); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    import torch

    assert f"version={torch.__version__!r}" in done.stdout
    assert f"cuda={torch.version.cuda!r}" in done.stdout


def test_a_system_that_does_not_account_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "is_accounted", lambda: False)
    with pytest.raises(EnvironmentLacks, match=r"does not report.*Linux"):
        detect("cpu")


@pytest.fixture
def scant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a sandbox that reports the resident size of a process and nothing else."""
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmSize:\t   4096 kB\nVmRSS:\t   2048 kB\n")
    monkeypatch.setattr(process_memory, "STATUS", status)
    monkeypatch.setattr(process_memory, "CLEAR_REFS", tmp_path / "clear_refs")


@pytest.mark.usefixtures("cuda_torch", "scant")
def test_a_card_needs_no_peak_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeCard("GPU-a"))
    assert detect()[0].kind == "cuda"
    assert process_memory.read().peak_resident == 2 * MIB
    with pytest.raises(EnvironmentLacks, match=r"does not report.*clear_refs"):
        detect("cpu")


def test_memory_that_was_swapped_out_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = tmp_path / "status"
    sizes = {"VmHWM": 4096, "VmRSS": 2048, "VmData": 8192, "RssAnon": 1024, "RssFile": 1000, "RssShmem": 24}
    monkeypatch.setattr(process_memory, "STATUS", status)
    for swapped in (0, 512):
        status.write_text("".join(f"{name}:\t{size} kB\n" for name, size in {**sizes, "VmSwap": swapped}.items()))
        memory = process_memory.read()
        assert memory.anonymous == (1024 + swapped) * KIB
        assert memory.peak_anonymous == (4096 - 1024 + swapped) * KIB


@pytest.mark.usefixtures("cuda_torch")
def test_a_card_needs_the_size_of_the_host_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, FakeCard("GPU-a"))
    monkeypatch.setattr(process_memory, "STATUS", tmp_path / "none")
    with pytest.raises(EnvironmentLacks, match="does not report"):
        detect()


def test_a_peak_that_cannot_be_restarted_is_no_peak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert process_memory.is_accounted()
    monkeypatch.setattr(process_memory, "CLEAR_REFS", tmp_path / "none")
    assert process_memory.is_readable() and not process_memory.is_accounted()


@pytest.mark.usefixtures("cuda_torch")
def test_ranks_need_a_card_each_and_all_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    h100, a100 = FakeCard("GPU-a"), FakeCard("GPU-c", name="NVIDIA A100-SXM4-40GB", total=40960 * MIB)
    install(monkeypatch, h100, FakeCard("GPU-b"), a100)
    hardware, _ = detect()
    check_devices(hardware, 2)
    with pytest.raises(
        EnvironmentLacks, match=r"equal cards.*H100 80GB HBM3 \(80 GiB\), NVIDIA A100-SXM4-40GB \(40 GiB\)"
    ):
        check_devices(hardware, 3)
    with pytest.raises(EnvironmentLacks, match=r"--devices 4 asks for 4 ranks, and h100-80g has 3 visible devices"):
        check_devices(hardware, 4)


def test_ranks_on_a_processor_need_a_core_each() -> None:
    there = cpu()
    check_devices(there, there.cores)
    with pytest.raises(EnvironmentLacks, match=rf"has {there.cores} cores, of which each rank takes at least one"):
        check_devices(there, there.cores + 1)


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        (["model name : AMD EPYC", "cpu family : 26", "model : 2"], "cpu-amd-epyc-family-26-model-2-"),
        (["cpu family : 25", "model : 97", "model name : AMD Ryzen 9 7950X"], "cpu-amd-ryzen-9-7950x-"),
        (["model name : QEMU Virtual CPU", "cpu family : 6"], "cpu-qemu-virtual-cpu-family-6-model-unknown-"),
        (["model name : Some SoC"], "cpu-some-soc-"),
    ],
)
def test_a_brand_alone_does_not_name_a_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reported: list[str], name: str
) -> None:
    file = tmp_path / "cpuinfo"
    second = ["", "processor : 1", "model name : another"]
    file.write_text("\n".join(["processor : 0", *reported, *second]))
    monkeypatch.setattr(instructions, "PROCESSORS", file)
    assert detection.cpu().name.startswith(name)


def test_arm_processors_have_numbers_for_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nCPU implementer : 0x41\nCPU part : 0xd40\n")
    monkeypatch.setattr(instructions, "PROCESSORS", file)
    monkeypatch.setattr(detection.platform, "processor", lambda: "")
    monkeypatch.setattr(detection.platform, "machine", lambda: "aarch64")
    assert detection.cpu().name.startswith("cpu-aarch64-implementer-0x41-part-0xd40-")


def test_one_thread_is_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from autofit.trial.machine.detection import cpu; print(cpu().name, cpu().cores)"
    bound = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one = cpu()
    assert bound.split() == [one.name, "1"] and one.cores == 1
    assert threads_per_rank(one, None) == 1


def test_a_key_from_before_instruction_sets_stays() -> None:
    here = cpu()
    later = ("instructions", "power_limit_watts", "mig_profile")
    old = {name: value for name, value in here.to_json().items() if name not in later}
    read = Hardware.from_json(old)
    assert read.key == digest([here.name, "cpu", here.device_name, here.cores]) != here.key


@pytest.mark.parametrize(
    ("capability", "native"),
    [("7.5", False), ("8.0", True), ("gfx906", False), ("gfx90a", True), ("gfx942", True), ("gfx1030", False),
     ("gfx1100", True), ("gfx1201", True)],
)  # fmt: skip
def test_which_devices_compute_in_bf16(capability: str, native: bool) -> None:
    assert detection._has_bf16(capability) is native
