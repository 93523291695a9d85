"""A config's memory and time, predicted for hardware that need not be in this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from autofit.catalog.hardware import Card
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.errors import UsageError
from autofit.core.lattice import Config
from autofit.estimate.assumptions import ASSUMED
from autofit.estimate.estimate import Estimate
from autofit.estimate.memory.deviation import MemoryDeviation
from autofit.planning.requests import WorkloadOptions, memory_limit
from autofit.prediction.calibration import rates_for
from autofit.prediction.estimate_cache import CachedEstimator, EstimateCache, readable
from autofit.prediction.helpful_changes import Expressible, advised
from autofit.prediction.memory_deviations import memory_deviations
from autofit.prediction.observed_allocator import as_trials_show
from autofit.techniques import Job, complete, recipe, unsupported
from autofit.trial.machine.detection import detect, installed_stack, requested_card

if TYPE_CHECKING:
    from autofit.estimate.estimator import Estimator
    from autofit.estimate.memory.timeline import Timeline
    from autofit.estimate.time.roofline import Rates


@dataclass(frozen=True, kw_only=True)
class Estimation:
    """A config that can be estimated: all answers share their traces."""

    job: Job
    """What is trained, and where."""
    rates: Rates | None
    config: Config
    memory_limit_bytes: int
    exact: bool = False
    """Whether every decoder layer is traced."""
    deviations: Mapping[str, MemoryDeviation] | None = None
    """How far predicted memory is off, by method; None leaves out how sure the estimate is."""
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
        job, limit, rates, deviations = setting(options, hardware, memory_limit_bytes, store)
        reason = why_not(config, job)
        if reason is not None:
            raise UsageError(reason)
        return cls(
            job=job,
            rates=rates,
            config=config,
            memory_limit_bytes=limit,
            exact=exact,
            deviations=deviations,
            store=store,
        )

    @cached_property
    def estimator(self) -> Estimator:
        """The estimator, made when it is needed: its imports take longer than an answer from the store."""
        from autofit.estimate.estimator import Estimator
        from autofit.estimate.tracing.trace_cache import TraceCache

        return Estimator(self.job, self.rates, exact=self.exact, cache=TraceCache.of_user())

    def estimate(self) -> Estimate:
        """The estimate, without advice."""
        return self._timed(self._unadvised)

    def advised(
        self,
        report: Callable[[int], None] = lambda done: None,
        expressible: Expressible | None = None,
    ) -> Estimate:
        """The estimate with changes that make it fit or, if it is likely to already, make it faster.

        Predicts configs near it; `report` is called with how many so far. `expressible` says what the user can write.
        """

        def refused(config: Config) -> str | None:
            return why_not(config, self.job)

        return self._timed(
            lambda estimator: advised(
                self._unadvised(estimator), estimator, refused, report, self.deviations, expressible or Expressible()
            )
        )

    def _unadvised(self, estimator: CachedEstimator) -> Estimate:
        return estimator.estimate(self.config, memory_limit_bytes=self.memory_limit_bytes)

    def _timed(self, estimate_with: Callable[[CachedEstimator], Estimate]) -> Estimate:
        """What `estimate_with` makes of the estimator; `seconds_to_estimate` is how long all of it took, now."""
        started = time.monotonic()
        with nullcontext() if self.exact else readable(self.store, create=True) as store:
            cache = EstimateCache(self.job, store, replayed=True)
            estimator = CachedEstimator(cache, self.rates, lambda: self.estimator)
            try:
                estimate = estimate_with(estimator)
            finally:  # interrupted or not, what was traced need not be traced again
                estimator.keep()
        estimate = estimate if self.deviations is None else estimate.judged(self.deviations)
        return replace(estimate, seconds_to_estimate=time.monotonic() - started)

    def timeline(self) -> Timeline:
        """The config's memory, event by event. Raises `NotTraced` where its memory is known by formula alone."""
        from autofit.estimate.tracing.recorder import NotTraced

        try:
            return self.estimator.trace(self.config).timeline
        except NotTraced as error:
            raise NotTraced(f"there is no memory timeline, because the step cannot be traced ({error})") from error


def setting(
    options: WorkloadOptions, hardware: str, memory_limit_bytes: int | None, store: str | None
) -> tuple[Job, int, Rates | None, Mapping[str, MemoryDeviation]]:
    """The job on a catalog card or, with `auto`, on this machine's device; the limit there; and, as far as the store's
    trials show them, the device's rates and how far off predicted memory is, by method. Raises `UsageError`."""
    device, stack = site(hardware)
    job, limit = options.job((device, stack)), memory_limit(memory_limit_bytes, device, options.devices)
    with readable(store) as opened_store:
        job = as_trials_show(job, opened_store)
        rates = rates_for(device, stack, opened_store, job.workload.key, job.model.digest)
        return job, limit, rates, memory_deviations(device, opened_store, options.devices)


def config_on(hardware: str, values: Mapping[str, object], trainer: str | None = None) -> Config:
    """The config with these values of axes: what they leave out takes the plain recipe's, or the nearest that a catalog
    card or, with `auto`, this machine's device has, and the trainer. Raises `UsageError`, and what `requested_card`
    raises."""
    return complete(values, recipe(requested_card(hardware) or detect()[0], trainer))


def why_not(config: Config, job: Job) -> str | None:
    """Why `config` cannot be estimated for `job`, in one sentence; None if it can."""
    return not_estimated(job.hardware) or unsupported(config, job)


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
    return _device(card), replace(stack, **kernels)


def not_estimated(device: Hardware) -> str | None:
    """Why nothing can be estimated for a device, in one sentence; None if it can."""
    if device.is_nvidia or device.kind == "cpu":
        return None
    return f"estimates are for NVIDIA cards and this machine's CPU; {device.name} is neither"


def _device(card: Card) -> Hardware:
    return Hardware(
        name=card.name,
        kind=card.kind,
        device_name=card.name,
        memory_bytes=card.memory_bytes,
        capability=card.capability,
        bf16=card.bf16,
        peak_flops=card.training_peak_flops,
    )
