"""Processes that begin with the libraries loaded, because one server loads them for all that it forks."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType

_STARTING = threading.Lock()


class _Process(ForkServerProcess):
    """A process without the program that starts it. Python would run that again here, and a script that calls
    `autofit.search` without a guard (`if __name__ == "__main__"`) would begin another search."""

    def start(self) -> None:
        with _STARTING:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")  # has no file that could be run
            try:
                super().start()
            finally:
                sys.modules["__main__"] = main


class _Context(ForkServerContext):
    Process = _Process


def hide_cards() -> None:
    """Have this process see no GPU, for good: bitsandbytes and Dynamo would take memory of each that it sees."""
    import torch

    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 0


def context() -> ForkServerContext:
    """Makes processes that a server forks: this process itself may have threads."""
    forkserver = _Context()
    forkserver.set_forkserver_preload(["autofit.estimate.preloaded"])
    return forkserver


@contextmanager
def without_collections() -> Iterator[None]:
    """Suspend garbage collection: scanning again and again what imports and traces hold takes much of their time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
