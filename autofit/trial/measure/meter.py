"""Clocks and memory counters of a device: one class per kind of device."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autofit.core.outcome import PHASES
from autofit.core.units import MIB, format_bytes
from autofit.trial.limits.segments import first_allocation
from autofit.trial.machine import nvml
from autofit.trial.measure import process_memory
from autofit.trial.process.classify import LATE_LOADED_BYTES, DeviceBusy, OverLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Peaks since the last reset, or since the trial began: fields of `Measurement`."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    setup_peak_bytes: int
    """`device_bytes` as of the last reset; 0 before the first."""
    host_peak_bytes: int
    phase_peaks: dict[str, int]


class Meter(ABC):
    """What a trial needs from its device. Used from one thread, in one process, for one trial."""

    leak_noise_bytes: int
    """How much `in_use` may grow per step without counting as a leak."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks = dict.fromkeys(PHASES, 0)
        """Bytes at the peak of each phase since the last reset."""
        self._setup_peak = 0

    @abstractmethod
    def enforce(self, limit: int) -> None:
        """Make allocations beyond `limit` bytes of device memory fail, context included.

        Raises `DeviceBusy` where others hold so much that the limit cannot be provided.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget the peaks so far and release cached memory, so that what follows is the step's alone."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the peak inside to the phase `name`; nothing waits for the device."""
        self._book()
        self._restart_peak()
        yield
        self.peaks[name] = max(self.peaks.get(name, 0), self._book())

    @abstractmethod
    def _book(self) -> int:
        """Add the counters to what is kept. Returns the peak of memory since they were restarted."""

    @abstractmethod
    def _restart_peak(self) -> None:
        """Restart the counters of peaks."""

    @abstractmethod
    def mark(self) -> Any:
        """A point in the device's time."""

    @abstractmethod
    def seconds(self, start: Any, end: Any) -> float:
        """Device seconds between two marks; waits for the device."""

    @abstractmethod
    def scalar(self, value: torch.Tensor) -> float:
        """A number that a step computed before a mark for which `seconds` has waited: waits for no later step."""

    @abstractmethod
    def in_use(self) -> int:
        """Bytes in use now, for detecting leaks."""

    def refusals(self) -> int:
        """How many allocations the device has refused, as far as it counts them: a program may go on after one."""
        return 0

    def expandable_segments(self) -> bool:
        """Whether the allocator uses expandable segments; asking for them does not give them on every platform."""
        return False

    @abstractmethod
    def reading(self) -> MemoryReading:
        """The peaks.

        Raises `OverLimit` where the driver nevertheless shows more than the limit, and `DeviceBusy` where others took
        memory meanwhile, so that no figure can be given.
        """


class CpuMeter(Meter):
    """The host as the device: the process's own resident memory, beyond what it had when the trial began, or whole."""

    leak_noise_bytes = 4 * MIB  # the heap's noise: freed memory is returned late and not in full

    def __init__(self, *, whole: bool = False) -> None:
        """`whole`: count all that the process has, imports included, and the peak that it has had."""
        super().__init__(torch.device("cpu"))
        self._baseline = self._held = 0
        if whole:
            self._held = process_memory.read().anonymous
        else:
            # Starts the thread pools, whose stacks are not part of the trial's memory.
            torch.ones(1 << 20).sum()
            process_memory.reset_peak()
            self._baseline = process_memory.read().anonymous
        self._peak = 0
        self._host_peak = 0

    def enforce(self, limit: int) -> None:
        process_memory.limit_to(process_memory.read().data + max(0, limit - self._held))

    def reset(self) -> None:
        self._book()
        self._setup_peak, self._peak = self._peak, 0
        self.peaks = dict.fromkeys(PHASES, 0)
        process_memory.trim()
        process_memory.reset_peak()

    def _book(self) -> int:
        now = process_memory.read()
        self._host_peak = max(self._host_peak, now.peak_resident)
        peak = max(0, now.peak_anonymous - self._baseline)
        self._peak = max(self._peak, peak)
        return peak

    def _restart_peak(self) -> None:
        process_memory.reset_peak()

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def scalar(self, value: torch.Tensor) -> float:
        return float(value)

    def in_use(self) -> int:
        return process_memory.read().anonymous

    def reading(self) -> MemoryReading:
        """There is no caching allocator: allocated, reserved and device memory are the same figure."""
        self._book()
        return MemoryReading(
            peak_allocated_bytes=self._peak,
            peak_reserved_bytes=self._peak,
            device_bytes=self._peak,
            setup_peak_bytes=self._setup_peak,
            host_peak_bytes=self._host_peak,
            phase_peaks=dict(self.peaks),
        )


def beside_allocator(held_by_others: int) -> int:
    """Bytes that this process now has on its CUDA device outside torch's allocator and paged optimizer states: the
    context and the kernels that libraries have loaded. `held_by_others` is what the device showed before this process
    used it, for where the driver does not tell processes apart."""
    own_bytes = nvml.own_bytes()
    if own_bytes is None:
        held = nvml.held_bytes()
        free, total = torch.cuda.mem_get_info()
        own_bytes = (total - free if held is None else held) - held_by_others
    return max(0, int(own_bytes - torch.cuda.memory_reserved() - process_memory.paged_bytes()))


class CudaMeter(Meter):
    """An NVIDIA or ROCm device, measured by torch's caching allocator and device events."""

    # The counter is exact. Smaller growth is a scalar that something keeps, which takes 512 bytes and ends no run.
    leak_noise_bytes = 64 * 1024

    def __init__(self, held_by_others: int | None = None) -> None:
        """`held_by_others`: what others hold of the device; None for all that is held now."""
        super().__init__(torch.device("cuda", 0))
        before = nvml.visible(0)
        held = before.held_bytes if before is not None else 0
        self._held_by_others = held if held_by_others is None else held_by_others
        """Where NVML does not say (ROCm), the device is assumed to be otherwise idle."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        first_allocation(self.device)
        self._reader = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        free, self._total = torch.cuda.mem_get_info()
        process_memory.device_bytes_taken_before = self._total - free - torch.cuda.memory_reserved()
        self._capacity = min(self._total, before.memory_bytes) if before is not None else self._total
        self.context = beside_allocator(self._held_by_others)
        """Bytes that the driver holds for this process outside the allocator: grows as libraries load kernels."""
        # Where the memory is the host's, a limit as large as what a trial may have of it must be enforced, too.
        self._unlimited_from = self._total if before is not None and before.shares_host else self._capacity
        self._limit = self._capacity
        self._is_enforced = False
        self._allocated = self._reserved = 0

    def _update_context(self) -> None:
        """Add kernels loaded since the last check to the context."""
        context = beside_allocator(self._held_by_others)
        if context > self.context + LATE_LOADED_BYTES:
            raise DeviceBusy(
                f"other processes took {format_bytes(context - self.context)} of the device while the trial ran"
            )
        self.context = max(self.context, context)

    def enforce(self, limit: int) -> None:
        self._limit, self._is_enforced = min(limit, self._capacity), True
        free = self._capacity - self._held_by_others
        if self._limit > free + nvml.BUSY_BYTES:
            raise DeviceBusy(
                f"other processes hold {format_bytes(self._held_by_others)} of the device: a memory limit of "
                f"{format_bytes(limit)} is not available (end them, or use --memory-limit {free // MIB}MiB)"
            )
        self._cap()

    def _cap(self) -> None:
        """Have torch enforce what is less than the device has: the rest is the driver's, as in a user's run."""
        room = max(0, self._limit - self.context)
        torch.cuda.set_per_process_memory_fraction(1.0 if self._limit >= self._unlimited_from else room / self._total)

    def reset(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        self._book()
        self._update_context()
        self._setup_peak = self._reserved + self.context
        torch.cuda.empty_cache()
        self._restart_peak()
        self._allocated = self._reserved = 0
        self.peaks = dict.fromkeys(PHASES, 0)
        if self._is_enforced:
            self._cap()  # the context has grown

    def _book(self) -> int:
        stats = torch.cuda.memory_stats()
        peak = int(stats["allocated_bytes.all.peak"])
        self._allocated = max(self._allocated, peak)
        self._reserved = max(self._reserved, int(stats["reserved_bytes.all.peak"]))
        return peak

    def _restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0

    def scalar(self, value: torch.Tensor) -> float:
        # Copied in a stream of its own: in the steps' own, the copy would wait for all that is queued.
        with torch.cuda.stream(self._reader):
            return float(value)

    def in_use(self) -> int:
        return torch.cuda.memory_allocated()

    def refusals(self) -> int:
        return int(torch.cuda.memory_stats().get("num_ooms", 0))

    def expandable_segments(self) -> bool:
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return any(segment["is_expandable"] for segment in segments)

    def reading(self) -> MemoryReading:
        """Device memory is the peak reserved plus context plus paged states.

        Paged states live in managed memory, which a device with room holds in full. With a limit below the device's
        capacity they count in full: nothing is paged out then, so the time that paging takes has not been measured.

        With such a limit a config can also be refused that a device of that size would just train: kernels that load
        after `reset` add to the context, while the allocator may have cached all that the limit then left. There, an
        allocation that failed would have emptied the cache.
        """
        self._book()
        self._update_context()
        device = self._reserved + self.context + process_memory.paged_bytes()
        if self._limit >= self._unlimited_from:
            device = min(device, self._capacity)  # the device itself was the limit: the excess was paged out
        if device > self._limit:
            raise OverLimit(
                f"the driver shows {format_bytes(device)} of {format_bytes(self._limit)}: "
                f"{format_bytes(self._reserved)} reserved, {format_bytes(self.context)} context, "
                f"{format_bytes(process_memory.paged_bytes())} paged"
            )
        return MemoryReading(
            peak_allocated_bytes=self._allocated,
            peak_reserved_bytes=self._reserved,
            device_bytes=device,
            setup_peak_bytes=self._setup_peak,
            host_peak_bytes=process_memory.read().peak_resident,
            phase_peaks=dict(self.peaks),
        )


def meter_for(kind: str, held_by_others: int | None = None, *, whole: bool = False) -> Meter:
    """The meter for a kind of device; raises `ValueError` for a kind without peak counters.

    `whole`: for a process that may have used the device before, which counts, too, as far as it is still held. What
    the device showed before that process began is then `held_by_others`, in bytes; None where it does not say.
    """
    if kind == "cpu":
        return CpuMeter(whole=whole)
    if kind == "cuda":
        return CudaMeter(held_by_others)
    raise ValueError(f"no memory meter for device kind {kind!r}")
