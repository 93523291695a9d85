"""Earlier estimates, looked up in the store; if the store fails, that costs time but never an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from autofit.core.errors import StoreError
from autofit.core.lattice import Config
from autofit.estimate.assumptions import context_bytes
from autofit.estimate.estimate import Estimate
from autofit.estimate.identity import EstimateKeys
from autofit.store import Store
from autofit.techniques import Job

if TYPE_CHECKING:
    from autofit.estimate.estimator import Estimator
    from autofit.estimate.time.roofline import Rates

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

    def known(self, keys: Iterable[str], job: Job, *, memory_limit_bytes: int) -> dict[str, Estimate]:
        """The kept estimates, by key, under this limit and with the job's context; `seconds_to_estimate` is what each
        took when it was made.

        Those that cannot be read count as absent, as do those for which these change more than whether they fit.
        """
        if self._store is None:
            return {}
        try:
            bodies = self._store.estimates.known(keys)
        except StoreError as error:
            self._give_up(error)
            return {}
        context = context_bytes(job) if job.hardware.kind == "cuda" else None
        found = {}
        for key, body in bodies.items():
            try:
                estimate = Estimate.from_json(body).under(memory_limit_bytes, context)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                _log.debug("the stored estimate %s cannot be read: %s", key, error)
                continue
            if estimate is not None:
                found[key] = estimate
        return found

    def keep(self, estimates: Mapping[str, Estimate]) -> None:
        """Keeps estimates by key, in place of those that could not be used (`known`), except estimates by formula:
        whatever prevented the trace may be fixed later."""
        traced = {key: estimate.to_json() for key, estimate in estimates.items() if estimate.memory_error == 0.0}
        if self._store is None or not traced:
            return
        try:
            self._store.estimates.keep(traced)
        except (StoreError, ValueError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        _log.warning("autofit: estimates are recomputed, since the store of estimates failed: %s", error)
        self._store = None


class CachedEstimator:
    """Looks each estimate up before it is made."""

    def __init__(self, job: Job, rates: Rates | None, store: Store | None, make: Callable[[], Estimator]) -> None:
        """Without a store, every estimate is made. `make` gives the estimator, with the same job and rates, and is
        called only when one is needed."""
        self.job = job
        self._rates = rates
        self._make = make
        self._cache = EstimateCache(store)
        self._keys = EstimateKeys(job, replayed=True)
        self._made: dict[str, Estimate] = {}

    def estimate(self, config: Config, *, memory_limit_bytes: int) -> Estimate:
        """As `Estimator.estimate`."""
        key = self._keys.of(config)
        known = self._cache.known([key], self.job, memory_limit_bytes=memory_limit_bytes)
        if key in known:
            return known[key].timed(self.job, self._rates)
        made = self._made[key] = self._make().estimate(config, memory_limit_bytes=memory_limit_bytes)
        return made

    def keep(self) -> None:
        """Keep what had to be made, all at once: a transaction for each would take longer than many an estimate."""
        self._cache.keep(self._made)
