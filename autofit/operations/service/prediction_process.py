"""Predictions in a process of their own, so that tracing a model can neither slow the server nor end it."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from autofit.core.errors import EnvironmentLacks
from autofit.core.units import GIB, format_bytes
from autofit.estimate.warm import context, hide_cards
from autofit.trial.machine.detection import host_memory_bytes
from autofit.workers.watch import end_with

T = TypeVar("T")

MEMORY_BYTES = 8 * GIB
"""Memory that the process may take, or half of this machine's or its container's. The largest traces take 2 GiB."""
CALLS = 8
"""More at once are refused."""
TASKS = 200
"""After so many answers another process takes over: libraries keep what they have traced."""
ANSWER_SECONDS = 300.0
"""How long an answer may take. Traces made by then are kept, so that asking again is answered sooner."""


class Overloaded(EnvironmentLacks):
    """A prediction cannot be made now."""


class TooLate(Overloaded):
    """There was no time for it, which says nothing about what was asked."""


class PredictionProcess:
    """Calls functions in one process, one at a time. Threads may share it."""

    def __init__(self) -> None:
        """It starts with the first call, or with `warm`."""
        self._memory_bytes = min(MEMORY_BYTES, host_memory_bytes() // 2)
        self._waiting_slots = threading.BoundedSemaphore(CALLS)
        self._turn = threading.Lock()
        """Held by the call that the process works for: ending the process costs no waiting call its answer."""
        self._pool: ProcessPoolExecutor | None = None
        self._last: Future[Any] | None = None
        self._answers = 0
        """How many calls this process was given, answered or not."""
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Start it and return at once: loading the libraries takes seconds, during which `call` waits."""
        if self._pool is None:
            threading.Thread(target=self._load, name="autofit-warm", daemon=True).start()

    def call(self, function: Callable[..., T], *arguments: Any, seconds: float = ANSWER_SECONDS, **keywords: Any) -> T:
        """What the function returns, or raises. Raises `Overloaded`."""
        if not self._waiting_slots.acquire(blocking=False):
            raise Overloaded("too many predictions are asked for at once", remedy="ask again in a minute")
        try:
            return self._in_turn(partial(function, *arguments, **keywords), seconds)
        except TimeoutError:
            raise TooLate(f"it takes longer than {seconds:.0f} s", remedy="ask again: it goes on") from None
        finally:
            self._waiting_slots.release()

    def _in_turn(self, work: Callable[[], T], seconds: float) -> T:
        until = time.monotonic() + seconds
        if not self._turn.acquire(timeout=seconds):
            raise TooLate(f"other predictions took all of {seconds:.0f} s", remedy="ask again")
        try:
            return self._answer(work, until)
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the process; the next call starts another."""
        with self._lock:
            self._end()

    def _answer(self, work: Callable[[], T], until: float) -> T:
        for _ in range(2):  # what ended the process may have been no fault of this call
            try:
                return self._submit(work).result(until - time.monotonic())
            except MemoryError:
                break
            except (BrokenProcessPool, CancelledError):
                if self._pool is None:
                    raise Overloaded("the server has ended its predictions", remedy="ask again") from None
                self.close()
        self.close()
        reason = f"it takes more than the {format_bytes(self._memory_bytes)} that the server grants it"
        raise Overloaded(reason, remedy="ask for a shorter sequence or a smaller micro-batch")

    def _load(self) -> None:
        with self._lock, suppress(RuntimeError):  # the program ends
            if self._pool is None:
                self._last = self._started().submit(_load)

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                1, mp_context=context(), initializer=_limit_process, initargs=(self._memory_bytes, os.getpid())
            )
            self._answers = 0
        return self._pool

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        with self._lock:
            # With max_tasks_per_child, calls that wait while a process retires may wait for ever (CPython gh-115634).
            if self._answers >= TASKS and (self._last is None or self._last.done()):
                self._end()
            self._last = future = self._started().submit(work)
            self._answers += 1
            return future

    def _end(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            for process in list((pool._processes or {}).values()):
                # It may be in the middle of minutes of work that nobody waits for, with processes of its own.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid or 0, signal.SIGKILL)
                process.kill()
            pool.shutdown(wait=True, cancel_futures=True)


def _limit_process(memory_bytes: int, server: int) -> None:
    """Limit the memory of this process and of what it starts (setrlimit(2), RLIMIT_DATA); all end with the server."""
    os.setpgid(0, 0)
    end_with(server, group=True)
    hide_cards()
    gc.freeze()
    with suppress(ValueError, OSError):  # a stricter limit is in force already
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def _load() -> None:
    import autofit.estimate.preloaded  # noqa: F401  (what it loads is what takes long)
