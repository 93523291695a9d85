"""What PyTorch's own viewers read: a snapshot of the allocator's history, a profiler trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from autofit.errors import UsageError

HISTORY_EVENTS = 200_000
"""Allocator events that a snapshot keeps: some steps of an 8B model."""


@contextmanager
def memory_snapshot(path: str | None) -> Iterator[None]:
    """Record allocations inside and write PyTorch's memory snapshot to `path`, also when memory runs out.

    The file opens at docs.pytorch.org/memory_viz. Raises `UsageError` where the device has no caching allocator.
    """
    if path is None:
        yield
        return
    if not torch.cuda.is_available():
        raise UsageError("--snapshot needs a CUDA device: the CPU has no caching allocator to take a snapshot of")
    torch.cuda.memory._record_memory_history(max_entries=HISTORY_EVENTS)
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)


def write_profile(path: str, run: Callable[[], object]) -> None:
    """Write a trace of `run` to `path`, for chrome://tracing or Perfetto."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True, profile_memory=True) as trace:
        run()
    trace.export_chrome_trace(path)
