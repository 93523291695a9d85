"""Files for PyTorch's own viewers, from one extra step: a snapshot of the allocator's history, a profiler trace.

A recording is an extra: if the step or the file fails, the measurement still stands.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from autofit.core.errors import UsageError


def check_writable(path: str, option: str) -> None:
    """Raise `UsageError` if `option`'s file cannot be written; an existing one is left as it is."""
    file = Path(path)
    existed = file.exists()
    try:
        with file.open("ab"):
            pass
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror}") from error
    if not existed:
        file.unlink()


def modified(path: str) -> int:
    """When the file was last written, in nanoseconds; 0 if there is none."""
    return os.stat(path).st_mtime_ns if os.path.exists(path) else 0


def memory_snapshot(path: str, run: Callable[[], object]) -> None:
    """Write PyTorch's memory snapshot of `run` on a CUDA device to `path`; it opens at docs.pytorch.org/memory_viz."""
    import torch

    try:
        torch.cuda.memory._record_memory_history(max_entries=200_000)  # a few steps of an 8B model
        try:
            run()
        finally:
            torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
    except Exception as error:
        _give_up(path, error)


def write_profile(path: str, run: Callable[[], object]) -> None:
    """Write a trace of `run` to `path`, for chrome://tracing or Perfetto."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    try:
        with profile(activities=activities, record_shapes=True, profile_memory=True) as trace:
            run()
        trace.export_chrome_trace(path)
    except Exception as error:
        _give_up(path, error)


def _give_up(path: str, error: Exception) -> None:
    """Leave no partial file: its absence tells the user."""
    print(f"{path} was not written: {error}", file=sys.stderr)
    Path(path).unlink(missing_ok=True)
