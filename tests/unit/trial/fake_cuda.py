"""A fake CUDA device: the driver's and the allocator's accounts of memory, as NVML and torch.cuda show them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from unit.trial.fake_nvml import MIB, FakeCard, install

TOTAL = 24000 * MIB
CONTEXT = 400 * MIB
"""The context of a process that has run nothing yet."""


class FakeCuda:
    """One card of 24,000 MiB, with the memory that this process and others use."""

    def __init__(self, *, others: int) -> None:
        self.card = FakeCard("GPU-a", total=TOTAL + 470 * MIB, used=others)
        self.others = others
        self.context = 0
        self.reserved = self.allocated = 0
        self.peak_reserved = self.peak_allocated = 0
        self.paged_resident = 0
        self.fraction = 1.0
        self.stream: object = None
        """The current one; None is the stream of the steps."""
        self.expandable = True
        """Whether the driver gives expandable segments to who asks for them."""

    def _book(self) -> None:
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.card.used = self.others + self.context + self.reserved + self.paged_resident

    def start(self) -> None:
        """CUDA starts in this process."""
        self.context, self.reserved, self.allocated = CONTEXT, 2 * MIB, 512
        self._book()

    def use(self, *, allocated: int, reserved: int | None = None) -> None:
        """The step allocates; freed memory stays reserved."""
        self.allocated = allocated
        self.reserved = max(self.reserved, reserved if reserved is not None else allocated)
        self._book()

    def load_kernels(self, size: int) -> None:
        """A library loads its kernels on first use."""
        self.context += size
        self._book()

    def others_take(self, size: int) -> None:
        """Another process allocates."""
        self.others += size
        self._book()

    def allowed(self) -> int:
        """Bytes that the allocator may reserve."""
        return int(self.fraction * TOTAL)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return TOTAL - self.card.used, TOTAL

    def memory_stats(self) -> dict[str, int]:
        return {"allocated_bytes.all.peak": self.peak_allocated, "reserved_bytes.all.peak": self.peak_reserved}

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return [{"total_size": self.reserved, "is_expandable": self.expandable}]

    def reset_peak_memory_stats(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def empty_cache(self) -> None:
        self.reserved = self.allocated
        self._book()

    def set_fraction(self, fraction: float) -> None:
        assert isinstance(fraction, float) and 0 <= fraction <= 1  # as torch checks it
        self.fraction = fraction

    @contextmanager
    def in_stream(self, stream: object) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def page(self, monkeypatch: pytest.MonkeyPatch, size: int, *, resident: int) -> None:
        """A bitsandbytes optimizer keeps `size` bytes of states in managed memory, `resident` of them on the card."""
        functional = ModuleType("bitsandbytes.functional")
        manager = SimpleNamespace(paged_tensors=[SimpleNamespace(nbytes=size)])
        functional.GlobalPageManager = SimpleNamespace(get_instance=lambda: manager)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "bitsandbytes.functional", functional)
        self.paged_resident = resident
        self._book()


def install_cuda(monkeypatch: pytest.MonkeyPatch, *, others: int = 0, nvml: bool = True) -> FakeCuda:
    """Make torch.cuda and pynvml show such a device."""
    fake = FakeCuda(others=others)
    install(monkeypatch, *((fake.card,) if nvml else ()))
    monkeypatch.delitem(sys.modules, "bitsandbytes.functional", raising=False)
    real_empty = torch.empty

    def empty(*sizes: Any, **options: Any) -> Any:
        if torch.device(options.get("device", "cpu")).type == "cuda":
            fake.start()
            return None
        return real_empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", empty)
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "init", lambda: None)
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda, "Stream", object)
    monkeypatch.setattr(cuda, "stream", fake.in_stream)
    monkeypatch.setattr(cuda, "mem_get_info", fake.mem_get_info)
    monkeypatch.setattr(cuda, "memory_reserved", lambda: fake.reserved)
    monkeypatch.setattr(cuda, "memory_allocated", lambda: fake.allocated)
    monkeypatch.setattr(cuda, "memory_stats", fake.memory_stats)
    monkeypatch.setattr(cuda, "memory_snapshot", fake.memory_snapshot)
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", fake.reset_peak_memory_stats)
    monkeypatch.setattr(cuda, "empty_cache", fake.empty_cache)
    monkeypatch.setattr(cuda, "set_per_process_memory_fraction", fake.set_fraction)
    monkeypatch.setattr(cuda, "get_per_process_memory_fraction", lambda: fake.fraction)
    return fake
