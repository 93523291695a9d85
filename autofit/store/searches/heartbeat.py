"""Keeps a driver's lease while it works, and tells it when that is lost."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Self

from autofit.core.errors import StoreError
from autofit.store.searches.lease import ENDED, LEASE_SECONDS, Lease, LeaseLost
from autofit.store.searches.queue import SearchQueue

LOOK_SECONDS = 1.0
"""Time between two looks whether the lease is still held: a cancelled search ends about that soon."""


class Heartbeat:
    """Renews a lease in a thread, from its beginning to the end of the context."""

    def __init__(self, queue: SearchQueue, lease: Lease) -> None:
        self.lease = lease
        self._queue = queue
        self._began: float | None = None
        self._over = threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._beat, name="autofit-lease", daemon=True)

    @property
    def spent_seconds(self) -> float:
        """What the search has spent of its time, by this driver and those before it."""
        return self.lease.spent_seconds + (0.0 if self._began is None else time.monotonic() - self._began)

    def begin_spending(self) -> None:
        """From now on time counts: until then, a driver may wait for a device that others use."""
        self._began = time.monotonic()

    def check(self) -> None:
        """Raises `LeaseLost` once the lease is lost."""
        if self._lost:
            raise LeaseLost(self.lease.search_id)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._over.set()
            self._thread.join()
            self._keep_ending(error)
        finally:
            ENDED.add(self.lease.owner)

    def _keep_ending(self, error: BaseException | None) -> None:
        """Stores how the search ends, `error` being why it does, before another driver may take it."""

    def _beat(self) -> None:
        renewed = time.monotonic() - LEASE_SECONDS  # a driver may have taken long to start
        while not self._lost and not self._over.wait(LOOK_SECONDS):
            try:
                if time.monotonic() - renewed < LEASE_SECONDS / 3:
                    self._lost = not self._queue.is_held(self.lease)
                else:
                    self._queue.renew(self.lease, self.spent_seconds)
                    renewed = time.monotonic()
            except LeaseLost:
                self._lost = True
            except StoreError as error:  # the search itself finds out whether that passes
                logging.getLogger(__name__).warning("autofit: the lease could not be renewed: %s", error)
