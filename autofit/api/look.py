"""A short look into the store from the thread that answers all requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi.concurrency import run_in_threadpool

from autofit.store import Store

T = TypeVar("T")


async def look(store: Store, work: Callable[[], T]) -> T:
    """What `work` returns after a short look into the store: in this thread where that is a file, as handing it over
    takes longer than the look; else in another, so that nothing waits for the database server."""
    return work() if store.folder is not None else await run_in_threadpool(work)
