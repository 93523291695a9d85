"""A config's memory and time, predicted for hardware that need not be in this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autofit.catalog.models import load
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.errors import UsageError
from autofit.core.lattice import Config
from autofit.estimate.assumptions import ASSUMED
from autofit.estimate.estimate import Estimate
from autofit.planning.requests import WorkloadOptions, memory_limit
from autofit.prediction.calibration import Calibration, why_not
from autofit.prediction.estimate_cache import CachedEstimator, EstimateCache, readable
from autofit.prediction.helpful_changes import Expressible, advised
from autofit.techniques import Job, complete, recipe
from autofit.trial.machine.detection import detect, installed_stack, requested_card

if TYPE_CHECKING:
    from autofit.estimate.estimator import Estimator
    from autofit.estimate.memory.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Estimation:
    """A config that can be estimated: all answers share their traces."""

    calibration: Calibration
    """What is trained, and what the store shows of where."""
    config: Config
    memory_limit_bytes: int
    exact: bool = False
    """Whether every decoder layer is traced."""
    store: str | None = None
    """Where estimates are looked up and kept, those of nearby configs included; not used for exact estimates."""

    @classmethod
    def of(
        cls,
        options: WorkloadOptions,
        config: Config,
        *,
        hardware: str = "auto",
        memory_limit_bytes: int | None = None,
        exact: bool = False,
        store: str | None = None,
    ) -> Estimation:
        """`config` on a catalog card or, with `auto`, on this machine's device; nothing is traced yet.

        The libraries are those installed here; the speed is calibrated on the store's trials on that hardware, if any,
        and predicted memory is as sure as those trials show. `exact` traces every decoder layer instead of repeating a
        few. Raises `UsageError` for a config that cannot work there, saying why.
        """
        calibration, limit = calibrated(options, hardware, memory_limit_bytes, store)
        reason = why_not(config, calibration.job)
        if reason is not None:
            raise UsageError(reason)
        return cls(calibration=calibration, config=config, memory_limit_bytes=limit, exact=exact, store=store)

    @property
    def job(self) -> Job:
        return self.calibration.job

    @cached_property
    def estimator(self) -> Estimator:
        """The estimator, made when it is needed: its imports take longer than an answer from the store."""
        from autofit.estimate.estimator import Estimator
        from autofit.estimate.tracing.trace_cache import TraceCache

        return Estimator(self.job, self.calibration.rates, exact=self.exact, cache=TraceCache.of_user())

    def estimate(self) -> Estimate:
        """The estimate, without advice; `seconds_to_estimate` is how long it took now."""
        started = time.monotonic()
        with self._cached_estimator() as estimator:
            estimate = estimator.estimate(self.config, memory_limit_bytes=self.memory_limit_bytes)
        return replace(estimate, seconds_to_estimate=time.monotonic() - started)

    def advised(
        self,
        report: Callable[[int], None] = lambda done: None,
        expressible: Expressible | None = None,
        *,
        of: Estimate | None = None,
    ) -> Estimate:
        """The estimate, or that `of` the config which was made before, with changes that make it fit or, if it is
        likely to already, make it faster.

        Predicts configs near it; `report` is called with how many so far. `expressible` says what the user can write.
        """
        started = time.monotonic()
        with self._cached_estimator() as estimator:
            estimate = of or estimator.estimate(self.config, memory_limit_bytes=self.memory_limit_bytes)
            estimate = advised(estimate, estimator, report, expressible or Expressible())
        before = 0.0 if of is None else of.seconds_to_estimate
        return replace(estimate, seconds_to_estimate=before + time.monotonic() - started)

    @contextmanager
    def _cached_estimator(self) -> Iterator[CachedEstimator]:
        with nullcontext() if self.exact else readable(self.store, create=True) as store:
            cache = EstimateCache(self.job, store, replayed=True)
            estimator = CachedEstimator(self.calibration, cache, lambda: self.estimator)
            try:
                yield estimator
            finally:  # interrupted or not, what was traced need not be traced again
                estimator.keep()

    def timeline(self) -> Timeline:
        """The config's memory, event by event. Raises `NotTraced` where its memory is known by formula alone."""
        from autofit.estimate.tracing.recorder import NotTraced

        try:
            return self.estimator.trace(self.config).timeline
        except NotTraced as error:
            raise NotTraced(f"there is no memory timeline, because the step cannot be traced ({error})") from error


def estimated(
    options: WorkloadOptions,
    config: Mapping[str, object],
    *,
    hardware: str,
    memory_limit_bytes: int | None = None,
    advice: bool,
    store: str,
) -> dict[str, Any]:
    """An estimate as `autofit estimate --json` prints it; axes that `config` leaves out take the plain recipe's values.
    Raises `UsageError`."""
    config_there = config_on(hardware, config, options.model, options.trainer)
    estimation = Estimation.of(
        options, config_there, hardware=hardware, memory_limit_bytes=memory_limit_bytes, store=store
    )
    return (estimation.advised() if advice else estimation.estimate()).to_json()


def calibrated(
    options: WorkloadOptions, hardware: str, memory_limit_bytes: int | None, store: str | None
) -> tuple[Calibration, int]:
    """The job on a catalog card or, with `auto`, on this machine's device, with what the store at this URL shows of it;
    and the memory limit there. Raises `UsageError`."""
    job = options.job(site(hardware))
    limit = memory_limit(memory_limit_bytes, job.hardware, options.devices)
    with readable(store) as opened_store:
        return Calibration.of(job, opened_store), limit


def config_on(hardware: str, values: Mapping[str, object], model: str, trainer: str | None = None) -> Config:
    """The config with these values of axes: what they leave out takes the plain recipe's, or the nearest that a catalog
    card or, with `auto`, this machine's device has, the model and the trainer. Raises `UsageError`, and what
    `requested_card` and `load` raise."""
    return complete(values, recipe(requested_card(hardware) or detect()[0], load(model), trainer))


def site(hardware: str) -> tuple[Hardware, Stack]:
    """A catalog card or, with `auto`, this machine's device, together with the libraries installed here.

    For a card, Liger's and flash-attn's kernels are assumed even if they are not installed here: no trace runs them.
    Raises what `requested_card` raises.
    """
    card = requested_card(hardware)
    if card is None:
        return detect()
    stack = installed_stack()
    kernels = {"liger_kernel": stack.liger_kernel or ASSUMED, "flash_attn": stack.flash_attn or ASSUMED}
    device = Hardware(
        name=card.name,
        kind=card.kind,
        device_name=card.name,
        memory_bytes=card.memory_bytes,
        capability=card.capability,
        bf16=card.bf16,
        peak_flops=card.training_peak_flops,
    )
    return device, replace(stack, **kernels)
