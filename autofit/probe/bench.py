"""Times calls on a device: as few as a slow one allows, on operands that are not in its caches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from autofit.core.units import MIB
from autofit.trial.limits.segments import first_allocation
from autofit.trial.machine.processor import cache_bytes
from autofit.trial.measure.process_memory import host_available

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
POOL_BYTES = 96 * MIB, 512 * MIB
"""On a processor and on an accelerator, operands are taken in turn from a buffer at least this large: several times the
last level of cache. On a processor that says how large that is, three times as much, but no more than a sixteenth of
the memory that is left."""
ALIGNED = 256
"""Elements. Some kernels refuse operands that do not begin at 16 bytes, and others are slow; torch's allocators align
to 64 bytes on a processor and to 512 on an accelerator."""
SLOW_SECONDS = 1.0
"""A first call that takes as long is not repeated on a processor where the measurement should take less: kernels that
are chosen or generated once take a fraction of that there. An accelerator's may take minutes."""
CYCLES_PER_SECOND = 2e9
"""The clock of a CUDA device that is kept busy; where it has fewer, it is kept busy for longer."""
clock = time.perf_counter


class Bench:
    """One device, with a buffer of normally distributed numbers in each format."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = POOL_BYTES[self.accelerator]
        if not self.accelerator:
            self.size = max(self.size, int(min(3 * cache_bytes(), self.room() / 16)))
        self._pools: dict[torch.dtype, torch.Tensor] = {}
        self._place = 0
        if device.type == "cuda":
            first_allocation(device)
        # The first product and the first backward pass start threads and load kernels.
        some = torch.ones(64, 64, device=device, requires_grad=True)
        (some @ some).sum().backward()  # type: ignore[no-untyped-call]

    @property
    def accelerator(self) -> bool:
        """Whether the device works through a queue of its own."""
        return self.device.type != "cpu"

    def take(self, dtype: torch.dtype, *shape: int, among: int | None = None) -> torch.Tensor:
        """A contiguous tensor of normally distributed numbers that no recent operation has read, among so many bytes of
        them if that is given; not to be written."""
        count = math.prod(shape)
        if count * dtype.itemsize > self.size:
            return self._drawn(dtype, count).view(shape)
        if dtype not in self._pools:
            self._pools[dtype] = self._drawn(dtype, self.size // dtype.itemsize)
        pool = self._pools[dtype]
        elements = len(pool) if among is None else max(min(len(pool), among // dtype.itemsize), count)
        after = -(-self._place // ALIGNED) * ALIGNED
        start = after % (elements - count + 1) // ALIGNED * ALIGNED
        self._place = start + count
        return pool[start : start + count].view(shape)

    def _drawn(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        block = torch.randn(min(count, 1 << 20), device=self.device).to(dtype)
        return block.repeat(-(-count // len(block)))[:count]

    def seconds(self, call: Callable[[], Any], *, most: float) -> float:
        """Seconds of one call: the least of a few, which take about `most` seconds after a first one that does not
        count. Only where that takes `SLOW_SECONDS` does it count itself."""
        first = self.timed(call)
        if first >= max(SLOW_SECONDS, most) and not self.accelerator:
            return first
        second = self.timed(call)
        if second >= max(SLOW_SECONDS, most):
            return second
        if self.accelerator:
            count = int(min(max(most / 4 / max(second, 1e-6), 1), 50))
            return min(self.timed(call, count, busy=count * second) / count for _ in range(3))
        repeats = int(min(most / max(second, 1e-6), 12)) - 1
        return min([second, *(self.timed(call) for _ in range(repeats))])

    def timed(self, call: Callable[[], Any], count: int = 1, *, busy: float = 0.0) -> float:
        """Seconds of these very calls, with the host's part where that is the slower one. A CUDA device is first kept
        `busy` for the seconds that the host takes to launch them, so that they follow each other without a gap and only
        the device's own time counts."""
        self.wait()
        if busy and self.device.type == "cuda" and torch.version.hip is None:  # whose clock is another
            cycles = int(min(busy, 0.05) * CYCLES_PER_SECOND)
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        started = self._mark()
        for _ in range(count):
            call()
        return self._since(started)

    def _mark(self) -> Any:
        """A moment of CUDA's own clock, by which a trial's steps are timed too; of the host's on other devices."""
        if self.device.type != "cuda":
            return clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _since(self, started: Any) -> float:
        ended = self._mark()
        self.wait()
        if isinstance(started, float):
            return clock() - started  # the device has done its work only now
        return float(started.elapsed_time(ended)) / 1000.0

    def wait(self) -> None:
        """Wait until the device has done all of its work."""
        if self.accelerator:
            torch.accelerator.synchronize()

    def room(self) -> float:
        """Bytes that the device has left; infinite where nobody says."""
        if self.device.type == "cuda":
            return float(torch.cuda.mem_get_info()[0])
        available = None if self.accelerator else host_available()
        return math.inf if available is None else float(available)

    def empty(self) -> None:
        """Give back what the device's allocator keeps."""
        self._pools.clear()
        if self.accelerator:
            torch.accelerator.memory.empty_cache()
