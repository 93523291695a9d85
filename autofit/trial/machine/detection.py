"""This machine: its device and the versions of its libraries, detected without initialising a driver."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import platform
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path

from autofit.catalog.hardware import Card, card, cards, match, matching_cards
from autofit.core.device.hardware import EMULATED, Hardware, Stack, compute_capability
from autofit.core.distribution import install
from autofit.core.errors import EnvironmentLacks, UsageError, lines_of, unknown
from autofit.core.units import GIB, format_duration
from autofit.trial.limits import control_groups
from autofit.trial.machine import nvml
from autofit.trial.machine.cores import cores, threads
from autofit.trial.machine.instructions import are_capped, instructions, processor_facts
from autofit.trial.measure import process_memory

_log = logging.getLogger(__name__)

GPU_NAMES = ("gpu", "cuda")
"""Names of hardware that mean whatever GPU this machine has."""
OPTIONAL = (
    "peft", "bitsandbytes", "deepspeed", "flash_attn", "liger_kernel", "mamba_ssm", "causal_conv1d",
    "flash_linear_attention",
)  # fmt: skip
"""Fields of `Stack` with the version of a package that may be missing."""
DEVICE_KINDS = ("auto", "cpu", "cuda", "mps", "xpu")
NVIDIA_NODES = Path("/dev/nvidiactl"), Path("/dev/nvhost-gpu")
"""What NVIDIA's driver makes where it drives a device (Linux, and Jetson)."""


def detect(device: str = "auto") -> tuple[Hardware, Stack]:
    """The device that trials would use here, and the software stack.

    Raises `UsageError` for an unknown kind and `EnvironmentLacks` for a kind that is absent or cannot be measured yet.
    """
    if device not in DEVICE_KINDS:
        raise unknown("device", device, DEVICE_KINDS)
    if device in ("mps", "xpu"):
        raise EnvironmentLacks(
            f"trials on {device} are not measured yet: torch keeps no peak-memory counters that autofit trusts there",
            remedy="use --device cpu or --device cuda",
        )
    stack = installed_stack()
    if device in ("auto", "cuda"):
        device_and_driver = _cuda(_torch_build())
        if device_and_driver is not None:
            _check_accounting(process_memory.is_readable(), "/proc/self/status")
            hardware, driver = device_and_driver
            return hardware, replace(stack, driver=driver)
        if device == "cuda":
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise EnvironmentLacks(
                f"no CUDA or ROCm device is found{'' if hidden is None else f' with CUDA_VISIBLE_DEVICES={hidden!r}'}",
                remedy="check nvidia-smi or rocm-smi",
            )
    _check_accounting(process_memory.is_accounted(), "/proc/self/status and clear_refs")
    return cpu(), stack


def requested_card(hardware: str, device: str = "auto") -> Card | None:
    """The card that a user names; None for this machine's device.

    `auto`, the device's name, the end of the driver's name for it (`RTX 4070`), and `gpu` on a machine with a GPU all
    mean this machine's device. Raises `UsageError` for a name that no card has, or that several may have.
    """
    name = hardware.strip().lower()
    if name == "auto":
        return None
    if matching_cards(name):
        return card(hardware)
    detected, _ = detect(device)
    is_detected = name == detected.name or f" {detected.device_name.lower()}".endswith(f" {name}")
    if is_detected or (name in GPU_NAMES and detected.kind == "cuda"):
        return None
    if name in GPU_NAMES:
        names = ", ".join(entry.name for entry in cards() if entry.supports)
        raise UsageError(f"hardware {hardware!r} does not say which, and this machine has no GPU: name one of {names}")
    return card(hardware)


def _check_accounting(accounted: bool, files: str) -> None:
    if not accounted:
        raise EnvironmentLacks(
            f"this system does not report the memory of a process and its peak ({files})",
            remedy="run trials on Linux 4.7 or newer, outside of sandboxes that hide /proc",
        )


def cpu() -> Hardware:
    name = _processor_name()
    count = threads()
    memory = host_memory_bytes()
    instruction_set = instructions()
    suffix = f"-{instruction_set}" if are_capped() else ""
    return Hardware(
        name=f"cpu-{_slug(name)}-{count}c"[: 64 - len(suffix)] + suffix,
        kind="cpu",
        device_name=name,
        memory_bytes=memory,
        cores=count,
        host_memory_bytes=memory,
        bf16=True,
        instructions=instruction_set,
    )


def check_devices(hardware: Hardware, ranks: int) -> None:
    """Raise `EnvironmentLacks` unless this machine has a device for each of `ranks` processes, all of one kind.

    A rank on the CPU takes at least one core. `hardware` is the first device, as `detect` returns it.
    """
    on_cpu = hardware.kind == "cpu"
    available = cores() if on_cpu else hardware.count
    if ranks > available:
        unit = "cores, of which each rank takes at least one" if on_cpu else "visible devices"
        raise EnvironmentLacks(
            f"--devices {ranks} asks for {ranks} ranks, and {hardware.name} has {available} {unit}",
            remedy=f"use --devices {available}, or --ray-address of a cluster that has more",
        )
    if ranks > 1 and not on_cpu:
        devices = nvml.devices()
        if devices is None:
            raise EnvironmentLacks(
                f"--devices {ranks} needs NVML, by which each rank gets a device of its own: {hardware.name} has none",
                remedy="use --devices 1, or install NVIDIA's driver library (on ROCm only one device can be used)",
            )
        check_even([_description(card) for card in devices.visible[:ranks]])


def check_alike(hardware: Hardware) -> None:
    """Raise `EnvironmentLacks` if this machine's visible cards, of which `hardware` is the first, are not all alike."""
    devices = nvml.devices() if hardware.kind == "cuda" else None
    kinds = sorted({_description(card) for card in devices.visible}) if devices is not None else []
    if len(kinds) > 1:
        raise EnvironmentLacks(
            f"this machine's cards differ ({', '.join(kinds)}): trials on one are not comparable with those on another",
            remedy="let CUDA_VISIBLE_DEVICES name devices of one kind, or use --workers 1",
        )


def _description(card: nvml.NvidiaDevice) -> str:
    return f"{card.name} ({round(card.marketed_bytes / GIB)} GiB)"


def check_even(cards: Sequence[str]) -> None:
    """Raise `EnvironmentLacks` if the cards of one group, each described in words, are not all alike."""
    if len(set(cards)) > 1:
        raise EnvironmentLacks(
            f"the ranks of one group need equal cards, and these differ: {', '.join(cards)}",
            remedy="let CUDA_VISIBLE_DEVICES or --hardware name cards of one kind, or use fewer --devices",
        )


def host_memory_bytes() -> int:
    """Physical memory, or what this process's control groups allow where that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return control_groups.memory_bytes(physical)


def installed_stack() -> Stack:
    """Versions of the installed libraries, read without importing them."""
    torch, transformers = version("torch"), version("transformers")
    if torch is None or transformers is None:
        raise EnvironmentLacks(f"{'torch' if torch is None else 'transformers'} is not installed", remedy=install())
    build = _torch_build()
    return Stack(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        torch=torch,
        transformers=transformers,
        **{name: version(name.replace("_", "-")) for name in OPTIONAL},
        cuda=f"rocm {build.hip}" if build.hip is not None else build.cuda,
    )


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _TorchBuild:
    version: str
    cuda: str | None
    """The CUDA version that it was built for."""
    hip: str | None
    """The ROCm version that it was built for."""


def _torch_build() -> _TorchBuild:
    """What torch was built for, from its version.py: a wheel's name need not say so, and an import takes seconds."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is installed"
    names = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return _TorchBuild(version=names["__version__"], cuda=names.get("cuda"), hip=names.get("hip"))


def _cuda(build: _TorchBuild) -> tuple[Hardware, str] | None:
    """The first visible NVIDIA or AMD device and the driver's version; None where there is none.

    Raises `EnvironmentLacks` for an NVIDIA device that the installed torch cannot use.
    """
    if build.hip is not None and (amd := _rocm()) is not None:
        return amd
    devices = nvml.devices()
    if devices is None or not devices.visible:
        not_loaded = nvml.is_not_loaded()
        is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        is_driven = any(node.exists() for node in NVIDIA_NODES) and not not_loaded and not is_hidden
        if devices is None and build.cuda is not None and is_driven:
            raise EnvironmentLacks(
                "this machine has an NVIDIA device, but not the driver's management library (libnvidia-ml.so.1)",
                remedy="give the container NVIDIA_DRIVER_CAPABILITIES=compute,utility; or use --device cpu",
            )
        if not_loaded:
            _warn("an NVIDIA driver is installed, but not loaded (see nvidia-smi)")
        return None
    first = devices.visible[0]
    others = [card for card in devices.visible if card.name != first.name]
    by_id = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith(("GPU-", "MIG-"))
    if others and not by_id and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        _warn(
            f"this machine's cards differ: {first.name} is used, the first on the PCI bus, and CUDA alone begins with "
            f"the fastest; choose with CUDA_VISIBLE_DEVICES, such as {others[0].uuid} for {others[0].name}"
        )
    if build.cuda is None:
        raise EnvironmentLacks(
            f"this machine has {first.name}, but the installed torch {build.version} is not built for CUDA",
            remedy="make install TORCH_INDEX=<URL for your CUDA version>, see docs/install.md; or use --device cpu",
        )
    # CUDA 13 compiles no kernels below that (its release notes: Maxwell, Pascal and Volta removed).
    if float(first.capability) < 7.5 and int(build.cuda.partition(".")[0]) >= 13:
        raise EnvironmentLacks(
            f"the installed torch {build.version} has no kernels for {first.name}: CUDA {build.cuda} begins at compute "
            f"capability 7.5, and this card has {first.capability}",
            remedy="make install TORCH_INDEX=<URL of a build for CUDA 12>, see docs/install.md; or use --device cpu",
        )
    hardware = _accelerator(
        first.name, first.marketed_bytes, first.memory_bytes, len(devices.visible), first.capability
    )
    name = f"{EMULATED if devices.is_emulated else ''}{hardware.name}"
    if first.mig_profile is not None and _slug(first.mig_profile) not in name:
        name += f"-{_slug(first.mig_profile)}"
    if first.power_limit_watts is not None:
        name += f"-{first.power_limit_watts}w"
    power_limit, profile = first.power_limit_watts, first.mig_profile
    return replace(hardware, name=name, power_limit_watts=power_limit, mig_profile=profile), devices.driver


@cache
def _warn(message: str) -> None:
    """Log a warning once per process: a device that is not used is seldom intended."""
    _log.warning("autofit: %s", message)


ROCM_SECONDS = 600.0
"""How long loading torch and asking it may take on a machine that others use."""
_ASK_ROCM = """
import json, torch
if torch.cuda.is_available():
    first = torch.cuda.get_device_properties(0)
    print(json.dumps([first.name, first.total_memory, torch.cuda.device_count(), first.gcnArchName, torch.version.hip]))
"""


def _rocm() -> tuple[Hardware, str] | None:
    """The first AMD device. Torch itself must be asked, in a process of its own that leaves no context behind."""
    if not Path("/dev/kfd").exists():
        return None
    try:
        completed = subprocess.run(
            [sys.executable, "-c", _ASK_ROCM], capture_output=True, text=True, timeout=ROCM_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentLacks(
            f"ROCm does not answer within {format_duration(ROCM_SECONDS)}", remedy="check rocm-smi, or use --device cpu"
        ) from error
    if completed.returncode != 0 or not completed.stdout.strip():
        message = lines_of(completed.stderr, "are you in the groups render and video?")[-1]
        _warn(f"torch for ROCm finds no device: {message}")
        return None
    # Libraries may print lines of their own before.
    name, memory, count, chip, hip = json.loads(completed.stdout.strip().splitlines()[-1])
    return _accelerator(name, memory, memory, count, chip.partition(":")[0]), hip


def _accelerator(device_name: str, marketed_bytes: int, memory_bytes: int, count: int, capability: str) -> Hardware:
    """The device as the catalog has it, or else by the driver's name; `marketed_bytes` has the driver's own share."""
    card = match(device_name, memory_bytes)
    return Hardware(
        name=card.name if card else f"{_slug(device_name)}-{round(marketed_bytes / GIB)}g",
        kind="cuda",
        device_name=device_name,
        memory_bytes=memory_bytes,
        count=count,
        host_memory_bytes=host_memory_bytes(),
        capability=capability,
        bf16=card.bf16 if card else _has_bf16(capability),
        peak_flops=card.training_peak_flops if card else None,
    )


def _has_bf16(capability: str) -> bool:
    """Whether a device computes in bf16: NVIDIA's from Ampere on, AMD's from CDNA and RDNA 3 on (MFMA and WMMA in AMD's
    matrix instruction calculator)."""
    if (version := compute_capability(capability)) is not None:
        return version >= 8.0
    family, rest = capability[3:-2], capability[-2:]
    return rest in ("08", "0a", "40", "41", "42", "50") if family == "9" else int(family) >= 11


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _processor_name() -> str:
    """The processor's name. Family and model are added to a name without a number, such as the brand "AMD EPYC" that
    some hypervisors report: processors of very different speed share it. ARM processors have no name; the numbers of
    implementer and part are added to the architecture's."""
    facts = processor_facts()
    name = facts.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in facts and not any(character.isdigit() for character in name):
        return f"{name} (family {facts['cpu family']}, model {facts.get('model', 'unknown')})"
    if "CPU part" in facts:
        return f"{name} (implementer {facts.get('CPU implementer', 'unknown')}, part {facts['CPU part']})"
    return name
