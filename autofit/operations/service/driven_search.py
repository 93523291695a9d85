"""Drives a search: its lease is kept meanwhile, and how it ends is stored, whatever ends it."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Any

from autofit.core.errors import AutofitError, NothingFits, StoreError, in_one_line
from autofit.planning.nothing_fits import Shortfall
from autofit.store import Heartbeat, Lease, LeaseLost, Store


class DrivenSearch(Heartbeat):
    """What this process does under a lease, as a context manager."""

    def __init__(self, store: Store, lease: Lease) -> None:
        super().__init__(store.queue, lease)
        self.result: dict[str, Any] = {}
        """What the search has found, to be stored with its end."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, Exception):
            self.result["reason"] = str(error) if isinstance(error, AutofitError) else in_one_line(error)
        if isinstance(error, Shortfall):
            self.result |= error.facts()
        # Every trial is kept by now. Failing to record the ending must not cost the answer or mask the real error.
        with suppress(StoreError, LeaseLost):
            if isinstance(error, KeyboardInterrupt) and self.lease.is_runners:
                self._queue.give_back(self.lease, "its driver was interrupted")
            else:
                self._queue.end(self.lease, _ending(error), self.result)


def _ending(error: BaseException | None) -> str:
    if error is None:
        return "succeeded"
    if isinstance(error, KeyboardInterrupt):
        return "cancelled"
    return "nothing_fits" if isinstance(error, NothingFits) else "failed"
