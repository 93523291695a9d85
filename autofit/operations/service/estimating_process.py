"""Predictions in a process of their own: what traces a model can neither slow the server nor end it."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, TypeVar

from autofit.core.errors import EnvironmentLacks
from autofit.core.units import GIB, format_bytes
from autofit.estimate.warm import context, hide_cards
from autofit.trial.machine.detection import host_memory_bytes
from autofit.workers.watch import end_with

T = TypeVar("T")

WAITING = 8
"""Requests that may wait for the process; more would only time out."""
MEMORY_BYTES = 8 * GIB
"""What it may take, or half of what this machine or its container has. The largest traces take 2 GiB."""
ANSWER_SECONDS = 300.0
"""How long an answer may take. What was traced by then is kept, so that who asks again has it sooner."""
TASKS = 200
"""After so many answers another process takes over: libraries keep what they have traced."""


class Overloaded(EnvironmentLacks):
    """A prediction cannot be made now."""


class TooLate(Overloaded):
    """There was no time for it, which says nothing about what was asked."""


class EstimatingProcess:
    """Calls functions in one process, one at a time. Threads may share it."""

    def __init__(self, *, waiting: int = WAITING) -> None:
        """The process starts with the first call, or with `warm`."""
        self._memory_bytes = min(MEMORY_BYTES, host_memory_bytes() // 2)
        self._room = threading.BoundedSemaphore(waiting)
        self._pool: ProcessPoolExecutor | None = None
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Start it, and return at once: it takes seconds to load the libraries, during which `submit` waits."""
        threading.Thread(target=self._load, name="autofit-warm", daemon=True).start()

    def call(self, function: Callable[..., T], *arguments: Any, seconds: float = ANSWER_SECONDS, **named: Any) -> T:
        """What the function returns, or raises. Raises `Overloaded` if too many wait, or if it takes too long or too
        much memory."""
        if not self._room.acquire(blocking=False):
            raise Overloaded("too many predictions are asked for at once", remedy="ask again in a minute")
        try:
            return self._started().submit(function, *arguments, **named).result(seconds)
        except TimeoutError:
            raise TooLate(f"it takes longer than {seconds:.0f} s", remedy="ask again: it goes on") from None
        except (MemoryError, BrokenProcessPool):
            self.close()
            took = f"it takes more than the {format_bytes(self._memory_bytes)} that the server grants it"
            raise Overloaded(took, remedy="ask for a shorter sequence or a smaller micro-batch") from None
        finally:
            self._room.release()

    def close(self) -> None:
        """End the process; the next call starts another."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            for process in list((pool._processes or {}).values()):
                # It may be in the middle of minutes of work that nobody waits for, with processes of its own.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid or 0, signal.SIGKILL)
                process.kill()
            pool.shutdown(wait=True, cancel_futures=True)

    def _load(self) -> None:
        with suppress(RuntimeError):  # closed meanwhile
            self._started().submit(_load)

    def _started(self) -> ProcessPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ProcessPoolExecutor(
                    1,
                    mp_context=context(),
                    initializer=_begin,
                    initargs=(self._memory_bytes, os.getpid()),
                    max_tasks_per_child=TASKS,
                )
            return self._pool


def _begin(memory_bytes: int, server: int) -> None:
    """Limit this process, and what it starts, to so much memory of its own (setrlimit(2), RLIMIT_DATA); all of them end
    with the server."""
    os.setpgid(0, 0)
    end_with(server, group=True)
    hide_cards()
    gc.freeze()
    with suppress(ValueError, OSError):  # a stricter limit is in force already
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def _load() -> None:
    import autofit.estimate.preloaded  # noqa: F401  (what it loads is what takes long)
