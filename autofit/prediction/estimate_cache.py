"""Earlier estimates, looked up in the store; if the store fails, that costs time but never an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autofit.core.errors import StoreError
from autofit.core.lattice import Config
from autofit.estimate.assumptions import context_bytes
from autofit.estimate.estimate import Estimate
from autofit.estimate.footprint import Footprint
from autofit.estimate.identity import EstimateKeys
from autofit.prediction.calibration import Calibration
from autofit.store import Store
from autofit.techniques import Job

if TYPE_CHECKING:
    from autofit.estimate.estimator import Estimator

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
    """The estimates of one job that were made before, by the keys of `estimate.identity`.

    What was looked up once is not looked up again until something is kept. Once the store has failed, nothing more is
    looked up or kept.
    """

    def __init__(self, job: Job, store: Store | None, *, replayed: bool = False) -> None:
        """Without a store, nothing is known or kept. `replayed` as for `Estimator.footprint`."""
        self.job = job
        self.store = store
        self._has_failed = False
        self._keys = EstimateKeys(job, replayed=replayed)
        self._context = context_bytes(job) if job.hardware.kind == "cuda" else None
        self._looked_up: dict[tuple[Config, int], Footprint | None] = {}
        """By config and limit; None for what is not known."""

    def find(self, configs: Sequence[Config], *, memory_limit_bytes: int) -> dict[Config, Footprint]:
        """The known footprints of `configs`, under this limit and with the job's context;
        `seconds_to_estimate` is what each took when it was made. A single question to the store.

        Those that cannot be read count as absent, as do those for which these change more than whether they fit.
        """
        looked_up, limit = self._looked_up, memory_limit_bytes
        new = {config: self._keys.of(config) for config in configs if (config, limit) not in looked_up}
        kept = self._read(new.values()) if new else {}
        looked_up.update(((config, limit), self._footprint(kept.get(key), limit)) for config, key in new.items())
        return {config: footprint for config in configs if (footprint := looked_up[config, limit]) is not None}

    def keep(self, footprints: Iterable[Footprint]) -> None:
        """Keeps footprints, in place of those that could not be used (`find`), except those by formula: whatever
        prevented the trace may be fixed later."""
        traced = {self._keys.of(f.config): f.to_json() for f in footprints if f.untraced is None}
        if self.store is None or self._has_failed or not traced:
            return
        self._looked_up.clear()
        try:
            self.store.estimates.keep(traced)
        except (StoreError, ValueError) as error:
            self._give_up(error)

    def _read(self, keys: Iterable[str]) -> Mapping[str, Mapping[str, Any]]:
        if self.store is None or self._has_failed:
            return {}
        try:
            return self.store.estimates.find(keys)
        except StoreError as error:
            self._give_up(error)
            return {}

    def _footprint(self, body: Mapping[str, Any] | None, memory_limit_bytes: int) -> Footprint | None:
        if body is None:
            return None
        try:
            return Footprint.from_json(body).under(memory_limit_bytes, self._context)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            _log.debug("a stored estimate cannot be read: %s", error)
            return None

    def _give_up(self, error: Exception) -> None:
        _log.warning("autofit: estimates are recomputed, since the store of estimates failed: %s", error)
        self._has_failed = True


class CachedEstimator:
    """Estimates configs under a calibration: looks them up in a cache, and makes those that it lacks."""

    def __init__(self, calibration: Calibration, cache: EstimateCache, make: Callable[[], Estimator]) -> None:
        """`make` gives the estimator, for the same job, and is called only when one is needed."""
        self.job = calibration.job
        self._calibration = calibration
        self._cache = cache
        self._make = make
        self._new: list[Footprint] = []

    def estimate(self, config: Config, *, memory_limit_bytes: int) -> Estimate:
        """The config's estimate under the calibration."""
        footprint = self._cache.find([config], memory_limit_bytes=memory_limit_bytes).get(config)
        if footprint is None:
            footprint = self._make().footprint(config, memory_limit_bytes=memory_limit_bytes)
            self._new.append(footprint)
        return self._calibration.estimate(footprint)

    def keep(self) -> None:
        """Keep what had to be made, all at once: a transaction for each would take longer than many an estimate."""
        self._cache.keep(self._new)
