"""What this machine is: its device and the versions of the libraries, found without initialising a driver."""

from __future__ import annotations

import os
import platform
import re
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from autofit.catalog.hardware import Card, match
from autofit.errors import EnvironmentLacks, unknown
from autofit.hardware import Hardware, Stack

NATIVE_BF16 = 8.0
"""First NVIDIA compute capability with bf16 arithmetic (Ampere)."""
DEVICE_KINDS = ("auto", "cpu", "cuda", "mps", "xpu")


def detect(device: str = "auto") -> tuple[Hardware, Stack]:
    """The device that trials would use here, and the stack.

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
        found = _nvidia() or _rocm()
        if found is not None:
            hardware, driver = found
            return hardware, _with_driver(stack, driver)
        if device == "cuda":
            raise EnvironmentLacks("no CUDA or ROCm device is found", remedy="check nvidia-smi or rocm-smi")
    return cpu(), stack


def cpu() -> Hardware:
    """This machine's processor as the device."""
    name = _processor_name()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = host_memory_bytes()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return Hardware(
        name=f"cpu-{slug}-{cores}c"[:64],
        kind="cpu",
        device_name=name,
        memory_bytes=memory,
        cores=cores,
        host_memory_bytes=memory,
        bf16=True,
    )


def host_memory_bytes() -> int:
    """Physical memory, or the control group's limit where that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        physical = min(physical, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return physical


def installed_stack() -> Stack:
    """Versions of the installed libraries, read without importing them."""
    torch = _version("torch")
    if torch is None:
        raise EnvironmentLacks("torch is not installed", remedy="pip install torch")
    transformers = _version("transformers")
    if transformers is None:
        raise EnvironmentLacks("transformers is not installed", remedy="pip install transformers")
    build = re.search(r"\+((?:cu|rocm)[\d.]+)", torch)
    return Stack(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        torch=torch,
        transformers=transformers,
        peft=_version("peft"),
        bitsandbytes=_version("bitsandbytes"),
        deepspeed=_version("deepspeed"),
        flash_attn=_version("flash-attn"),
        liger_kernel=_version("liger-kernel"),
        cuda=build[1] if build else None,
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _with_driver(stack: Stack, driver: str) -> Stack:
    return Stack(**{**stack.to_json(), "driver": driver})


def _nvidia() -> tuple[Hardware, str] | None:
    """The first visible NVIDIA device and the driver's version, through NVML; None where there is none."""
    try:
        import pynvml
    except ImportError:
        return _nvidia_smi()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        count = pynvml.nvmlDeviceGetCount()
        if count == 0:
            return None
        handle = pynvml.nvmlDeviceGetHandleByIndex(_first_visible())
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        hardware = _accelerator(
            device_name=_text(pynvml.nvmlDeviceGetName(handle)),
            memory=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            count=count,
            capability=f"{major}.{minor}",
        )
        return hardware, _text(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _nvidia_smi() -> tuple[Hardware, str] | None:
    """The same from the nvidia-smi program, where NVML's Python package is missing."""
    import subprocess

    query = "name,memory.total,driver_version,compute_cap"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 3]
    if done.returncode != 0 or not rows:
        return None
    name, mebibytes, driver, capability = rows[min(_first_visible(), len(rows) - 1)]
    hardware = _accelerator(device_name=name, memory=int(mebibytes) * 1024**2, count=len(rows), capability=capability)
    return hardware, driver


def _rocm() -> tuple[Hardware, str] | None:
    """The first AMD device; torch itself must be asked, as the kernel names only the chip."""
    if not Path("/dev/kfd").exists():
        return None
    import torch

    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    hardware = _accelerator(
        device_name=properties.name,
        memory=int(properties.total_memory),
        count=torch.cuda.device_count(),
        capability=None,
    )
    return hardware, str(torch.version.hip)


def _accelerator(*, device_name: str, memory: int, count: int, capability: str | None) -> Hardware:
    card: Card | None = match(device_name, memory)
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return Hardware(
        name=card.name if card else slug,
        kind="cuda",
        device_name=device_name,
        memory_bytes=memory,
        count=count,
        host_memory_bytes=host_memory_bytes(),
        capability=capability,
        bf16=card.bf16 if card else capability is None or float(capability) >= NATIVE_BF16,
        peak_flops=card.training_peak_flops if card else None,
    )


def _first_visible() -> int:
    """Index of the first device that CUDA_VISIBLE_DEVICES leaves; 0 where it names none by number."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    return int(first) if first.isdecimal() else 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _processor_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
