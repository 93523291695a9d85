"""Earlier estimates, looked up in the store; if the store fails, that costs time but never an answer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from autofit.errors import StoreError
from autofit.estimate.estimate import Estimate
from autofit.store import Store

_log = logging.getLogger(__name__)


@contextmanager
def readable(url: str | None, *, create: bool = False) -> Iterator[Store | None]:
    """The store at `url` (as for `Store.open`), or None if it is missing or fails: estimates can do without it."""
    try:
        opened = Store.open(url, create=create)
    except StoreError as error:
        _log.debug("continuing without stored estimates: %s", error)
        yield None
        return
    with opened:
        yield opened


class EstimateCache:
    """Estimates by the keys of `estimate.identity`. Once the store has failed, nothing more is looked up or kept."""

    def __init__(self, store: Store | None) -> None:
        """Without a store, nothing is looked up or kept."""
        self._store = store

    def known(self, keys: Iterable[str], *, memory_limit_bytes: int) -> dict[str, Estimate]:
        """The kept estimates, by key, under this limit; `seconds_to_estimate` is what each took when it was made.

        Those that cannot be read count as absent, as do those for which this limit changes more than whether they fit.
        """
        if self._store is None:
            return {}
        try:
            bodies = self._store.known_estimates(keys)
        except StoreError as error:
            self._give_up(error)
            return {}
        found = {}
        for key, body in bodies.items():
            try:
                estimate = Estimate.from_json(body).under(memory_limit_bytes)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                _log.debug("the stored estimate %s cannot be read: %s", key, error)
                continue
            if estimate is not None:
                found[key] = estimate
        return found

    def keep(self, estimates: Mapping[str, Estimate]) -> None:
        """Keeps estimates by key, except those by formula: whatever prevented the trace may be fixed later."""
        traced = {key: estimate.to_json() for key, estimate in estimates.items() if estimate.memory_error == 0.0}
        if self._store is None or not traced:
            return
        try:
            self._store.keep_estimates(traced)
        except (StoreError, ValueError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        _log.warning("autofit: estimates are recomputed, since the store of estimates failed: %s", error)
        self._store = None
