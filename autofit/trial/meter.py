"""Clocks and memory counters of a device: one class per kind, the same questions to each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autofit.hardware import Hardware
from autofit.outcome import PHASES
from autofit.trial import process_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Peaks since the trial began, bytes."""

    peak_allocated: int
    peak_reserved: int
    device: int
    host_peak: int
    """Peak resident memory of the process."""
    phase_peaks: dict[str, int]


class Meter(Protocol):
    """What a trial asks of its device. Used from one thread, in one process, for one trial."""

    device: torch.device

    def enforce(self, limit: int) -> None:
        """Make allocations beyond `limit` bytes of device memory fail, context included."""

    def phase(self, name: str) -> Any:
        """A context in which peak memory is booked to the phase `name`."""

    def mark(self) -> Any:
        """A point in the device's time."""

    def seconds(self, start: Any, end: Any) -> float:
        """Device seconds between two marks; waits for the device."""

    def in_use(self) -> int:
        """Bytes in use now, for leaks."""

    def reading(self) -> MemoryReading:
        """The peaks so far."""


class CpuMeter:
    """The host as device: the process's own resident memory, beyond what it had when the trial began."""

    def __init__(self, hardware: Hardware) -> None:
        self.device = torch.device("cpu")
        torch.set_num_threads(max(1, hardware.cores))
        # Starts the thread pools, whose stacks are no part of the trial's memory.
        torch.ones(1 << 20).sum()
        process_memory.reset_peak()
        self._baseline = process_memory.read().anonymous
        self._peaks = dict.fromkeys(PHASES, 0)
        self._peak = 0
        self._host_peak = 0

    def enforce(self, limit: int) -> None:
        """Allocations beyond `limit` bytes fail."""
        process_memory.limit_further(limit)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the peak inside to `name`."""
        self._book()
        process_memory.reset_peak()
        yield
        self._peaks[name] = max(self._peaks[name], self._book())

    def _book(self) -> int:
        now = process_memory.read()
        self._host_peak = max(self._host_peak, now.peak_resident)
        peak = max(0, now.peak_anonymous - self._baseline)
        self._peak = max(self._peak, peak)
        return peak

    def mark(self) -> float:
        """Now, in seconds of a steady clock."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Seconds between two marks."""
        return end - start

    def in_use(self) -> int:
        """Anonymous resident bytes."""
        return process_memory.read().anonymous

    def reading(self) -> MemoryReading:
        """The CPU has no caching allocator: allocated, reserved and device memory are one figure."""
        self._book()
        return MemoryReading(
            peak_allocated=self._peak,
            peak_reserved=self._peak,
            device=self._peak,
            host_peak=self._host_peak,
            phase_peaks=dict(self._peaks),
        )


class CudaMeter:
    """An NVIDIA or ROCm device, by torch's caching allocator and device events."""

    def __init__(self, hardware: Hardware) -> None:
        self.device = torch.device("cuda", 0)
        free_before = _driver_free()
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.empty(1, device=self.device)
        torch.cuda.synchronize()
        free, self._total = torch.cuda.mem_get_info()
        before = self._total if free_before is None else free_before
        self.context = max(0, before - free - torch.cuda.memory_reserved())
        """Bytes that the driver took for this process beside the allocator's."""
        self._peaks = dict.fromkeys(PHASES, 0)
        self._allocated = 0
        self._reserved = 0

    def enforce(self, limit: int) -> None:
        """Allocations fail once reserved memory and the context exceed `limit` bytes."""
        room = max(0, limit - self.context)
        torch.cuda.set_per_process_memory_fraction(min(1.0, room / self._total))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the peak inside to `name`. The counters are the allocator's own: nothing waits for the device."""
        self._book()
        torch.cuda.reset_peak_memory_stats()
        yield
        self._peaks[name] = max(self._peaks[name], self._book())

    def _book(self) -> int:
        stats = torch.cuda.memory_stats()
        peak = int(stats["allocated_bytes.all.peak"])
        self._allocated = max(self._allocated, peak)
        self._reserved = max(self._reserved, int(stats["reserved_bytes.all.peak"]))
        return peak

    def mark(self) -> torch.cuda.Event:
        """An event in the device's stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Device seconds between two events."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0

    def in_use(self) -> int:
        """Allocated bytes."""
        return torch.cuda.memory_allocated()

    def reading(self) -> MemoryReading:
        """Device memory is the peak reserved plus the context."""
        self._book()
        return MemoryReading(
            peak_allocated=self._allocated,
            peak_reserved=self._reserved,
            device=self._reserved + self.context,
            host_peak=process_memory.read().peak_resident,
            phase_peaks=dict(self._peaks),
        )


def _driver_free() -> int | None:
    """Free bytes of device 0 before this process has a context, from NVML; None where NVML cannot be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).free)
    except Exception:  # any failure means the same: unknown
        return None


def meter_for(hardware: Hardware) -> Meter:
    """The meter of a device kind; raises `ValueError` for a kind that has no peak counters."""
    if hardware.kind == "cpu":
        return CpuMeter(hardware)
    if hardware.kind == "cuda":
        return CudaMeter(hardware)
    raise ValueError(f"no memory meter for device kind {hardware.kind!r}")
