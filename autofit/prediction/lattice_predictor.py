"""Every config of a lattice predicted before the first trial, and how far earlier predictions were off here."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autofit.core.errors import StoreError, in_one_line
from autofit.core.lattice import Config
from autofit.core.outcome import Prediction, context_keys
from autofit.core.units import MIB
from autofit.estimate.memory.deviation import nothing_compared
from autofit.planning.plan import Plan
from autofit.planning.requests import SearchRequest
from autofit.prediction.calibration import as_trials_show, is_detected, not_estimated, rates_for
from autofit.prediction.emulated_formats import emulated_configs, from_fp32, in_fp32
from autofit.prediction.estimate_cache import EstimateCache
from autofit.prediction.memory_deviations import COMPARED, learned
from autofit.prediction.predict_configs import configs_to_trace, predict_all, processes
from autofit.prediction.predictions import Predictions, Report
from autofit.prediction.probing import make_sure, stored_probe
from autofit.store import Store
from autofit.techniques import Job

ESTIMATING_SHARE = 0.3
"""Share of a time budget that estimating may take: configs that it does not come to are left unpredicted."""
FIRST_ESTIMATES_SECONDS = 9.0
"""What loading the libraries, 6 s, and one trace take on two cores of 2021 (`benchmarks/timings.py estimator`): with
less time none is begun."""

IMPORTS_BYTES = 350 * MIB
"""What Python takes on a processor with torch 2.13 and transformers 5.23 loaded, which a user's program counts, too."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class LatticePredictor:
    """Predicts the lattice of one search. What that needs may be loaded before it is asked for."""

    job: Job
    configs: Sequence[Config]
    """The configs that may fit."""
    memory_limit_bytes: int
    seconds: float | None
    """The search's time budget, None if it has none."""
    store: Store
    one_host: bool
    """All trials run on this machine and share its host memory. On a cluster Ray chooses each trial's machine, so each
    trial is judged as if alone there."""
    tried: Sequence[Config] = ()
    """Others of which the store has trials: they show how far predictions err, where they were predicted before."""
    predicts: bool = True
    """Whether predictions are wanted; without them a config is held against the host's memory by formula."""
    probes: bool = False
    """Whether this machine's device is probed first, unless the store has its rates."""
    _cache: EstimateCache | None = field(init=False, default=None)
    _emulated: Mapping[Config, float] = field(init=False, default_factory=dict)
    """The configs that are not traced (`emulated_configs`)."""

    @classmethod
    def of(cls, plan: Plan, request: SearchRequest, store: Store, *, probes: bool) -> LatticePredictor:
        """The predictor of the search that `request` asks for; a cluster's device is never probed from here."""
        one_host = request.ray_address is None
        return cls(
            job=plan.job,
            configs=plan.possible,
            tried=_tried_beyond_limit(plan, store),
            memory_limit_bytes=plan.limits.memory_bytes,
            seconds=plan.limits.seconds,
            store=store,
            one_host=one_host,
            predicts=request.predict,
            probes=probes and one_host,
        )

    def get_ready(self) -> None:
        """Probe the device, and begin to load, in the background, what `predict` will need; that a load fails is left
        for `predict` to meet."""
        from autofit.estimate import sweep

        if not self.predicts:
            return
        try:
            cache, only_known = self._prepared()
            configs, limit = [*self.configs, *self.tried], self.memory_limit_bytes
            sweep.get_ready(
                configs_to_trace(cache, configs, memory_limit_bytes=limit, only_known=only_known), processes()
            )
        except Exception as failure:
            _log.debug("nothing is loaded ahead of the predictions: %s", in_one_line(failure))

    def predict(self, report: Report) -> Predictions:
        """What the estimator predicts, and how far it was off in earlier trials on this hardware.

        `report` is called with the number of configs estimated and their total. A failure is logged in one line and
        costs only the predictions.
        """
        if not self.predicts:
            return self._by_formula(self.configs)
        try:
            cache, only_known = self._prepared()
            job, store = cache.job, self.store
            estimates = predict_all(
                cache,
                [*self.configs, *self.tried],
                memory_limit_bytes=self.memory_limit_bytes,
                rates=rates_for(job, store),
                only_known=only_known,
                report=report,
                seconds=None if self.seconds is None else ESTIMATING_SHARE * self.seconds,
            )
            # Trials of this search's own workload and stack are left out: the search recalls them one by one.
            own_keys = (job.workload.key, job.stack.key)
            predicted = store.predicted(hardware_key=job.hardware.key, latest=COMPARED)
            foreign = (trial for trial in predicted if (trial.workload.key, trial.stack.key) != own_keys)
            earlier = [trial for trial in foreign if trial.workload.program == job.workload.program]
            by_config = {c: as_of_program(e.prediction, job) for c, e in estimates.items()}
            for config, slower in self._emulated.items():
                if config not in estimates and in_fp32(config) in estimates:
                    by_config[config] = from_fp32(config, by_config[in_fp32(config)], slower)
            deviation = learned(earlier, nothing_compared(job.hardware, job.workload.devices))
            predictions = Predictions(by_config=by_config, memory_deviation=deviation)
        except Exception as failure:
            _log.warning("autofit: continuing without predictions, which failed: %s", in_one_line(failure))
            return self._by_formula(self.configs)
        others = self._by_formula([c for c in self.configs if c not in estimates])
        return replace(
            predictions,
            beyond_host={
                **others.beyond_host,
                **{c: e.host_short_bytes for c, e in estimates.items() if e.host_short_bytes},
            },
            host_bytes={c: e.machine_host_bytes for c, e in estimates.items()},
            shared_host_bytes=(job.hardware.host_memory_bytes or None) if self.one_host else None,
        )

    def _by_formula(self, configs: Sequence[Config]) -> Predictions:
        """Predictions without a trace: which of these offload more than the host holds. A failure costs only that."""
        offloading = [config for config in configs if config["offload"] != "none"]
        if not offloading:
            return Predictions()
        try:
            from autofit.estimate.sharding.hosted import host_short_bytes  # PyTorch with it, which takes seconds

            lacking = {config: host_short_bytes(config, self.job) for config in offloading}
        except Exception as failure:
            _log.warning("autofit: the host's memory is not held against the configs: %s", in_one_line(failure))
            return Predictions()
        return Predictions(beyond_host={config: size for config, size in lacking.items() if size})

    def _prepared(self) -> tuple[EstimateCache, set[Config]]:
        """The estimates made before, and the configs of which no others are worth making. The device is probed first:
        whatever is begun before would disturb that."""
        if self._cache is None:
            job, store = self.job, self.store
            # Of a device for which nothing is estimated, rates are of no use.
            if self.probes and is_detected(job.hardware) and not_estimated(job.hardware) is None:
                make_sure(job, store, budget_seconds=self.seconds)
            stored = stored_probe(job.hardware, job.stack, store, job.model.digest)
            self._emulated = emulated_configs(self.configs, stored)
            self._cache = EstimateCache(as_trials_show(job, store), store)
        only_known = {*self._emulated, *self.tried}
        if self.seconds is not None and ESTIMATING_SHARE * self.seconds < FIRST_ESTIMATES_SECONDS:
            only_known.update(self.configs)  # those made before cost nothing
        return self._cache, only_known


def as_of_program(prediction: Prediction, job: Job) -> Prediction:
    """The prediction of autofit's step as a guess at what a user's program takes with the same config; unchanged for a
    job without one."""
    if job.workload.program is None or job.hardware.kind != "cpu":
        return prediction
    return replace(
        prediction,
        peak_allocated_bytes=prediction.peak_allocated_bytes + IMPORTS_BYTES,
        device_bytes=prediction.device_bytes + IMPORTS_BYTES,
    )


def _tried_beyond_limit(plan: Plan, store: Store) -> list[Config]:
    """The configs of the lattice that cannot fit, of which the store has trials under a higher limit."""
    job, possible = plan.job, set(plan.possible)
    try:
        recorded = store.known(**context_keys(job.hardware, job.stack, job.workload))
    except StoreError as error:
        _log.warning("autofit: what was tried before cannot be looked up: %s", error)
        return []
    return [config for config in plan.lattice.configs if config in recorded and config not in possible]
