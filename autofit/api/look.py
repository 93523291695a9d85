"""A short look into the store from the thread that answers all requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi.concurrency import run_in_threadpool

from autofit.store import Store

T = TypeVar("T")


async def look(store: Store, work: Callable[[], T]) -> T:
    """What `work` returns after a short look into the store.

    Where the store is a file, this thread does the work: handing it over takes several times as long as the look. Where
    it is a database server, another thread does, so that nothing else waits for the server."""
    return work() if store.folder is not None else await run_in_threadpool(work)
