"""Every config of a lattice predicted before the first trial, and how far earlier predictions were off here."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autofit.core.device.probe import Probe
from autofit.core.device.probe_findings import times_as_slow_as_fp32
from autofit.core.errors import in_one_line
from autofit.core.frontier import PRACTICAL
from autofit.core.lattice import Config
from autofit.core.outcome import context_keys
from autofit.core.prediction import Prediction
from autofit.core.units import MIB
from autofit.estimate.estimate import Estimate
from autofit.estimate.memory.deviation import nothing_compared
from autofit.planning.plan import Plan
from autofit.planning.requests import SearchRequest
from autofit.prediction.calibration import as_trials_show, is_detected, not_estimated, rates_for
from autofit.prediction.estimate_cache import EstimateCache
from autofit.prediction.memory_deviations import COMPARED, learned
from autofit.prediction.predict_configs import configs_to_trace, predict_all, processes
from autofit.prediction.predictions import Predictions, Report
from autofit.prediction.probing import make_sure, stored_probe
from autofit.store import Store
from autofit.techniques import Job
from autofit.techniques.axes.precision import product_format

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

    plan: Plan
    request: SearchRequest
    store: Store
    probes: bool = False
    """Whether this machine's device is probed first, unless the store has its rates; a cluster's device never is."""
    _cache: EstimateCache | None = field(init=False, default=None)
    _tried: Sequence[Config] = field(init=False, default=())
    """Configs that cannot fit, of which the store has trials under a higher limit: they show how far predictions err,
    where they were predicted before."""
    _emulated: Mapping[Config, float] = field(init=False, default_factory=dict)
    """The configs that are not traced (`_emulated_configs`)."""

    def get_ready(self) -> None:
        """Probe the device, and begin to load, in the background, what `predict` will need; that a load fails is left
        for `predict` to meet."""
        from autofit.estimate import sweep

        if not self.request.predict:
            return
        try:
            cache, configs, only_known = self._prepared()
            known = cache.find(configs, memory_limit_bytes=self.plan.limits.memory_bytes)
            sweep.get_ready(configs_to_trace(cache.job, configs, known=known, only_known=only_known), processes())
        except Exception as failure:
            _log.debug("nothing is loaded ahead of the predictions: %s", in_one_line(failure))

    def predict(self, report: Report) -> Predictions:
        """What the estimator predicts, and how far it was off in earlier trials on this hardware.

        `report` is called with the number of configs estimated and their total. A failure is logged in one line and
        costs only the predictions.
        """
        possible, limits = self.plan.possible, self.plan.limits
        if not self.request.predict:
            return self._by_formula(possible)
        try:
            cache, configs, only_known = self._prepared()
            job, store = cache.job, self.store
            rates = rates_for(job, store)
            footprints = predict_all(
                cache,
                configs,
                memory_limit_bytes=limits.memory_bytes,
                only_known=only_known,
                report=report,
                seconds=None if limits.seconds is None else ESTIMATING_SHARE * limits.seconds,
            )
            estimates = {config: Estimate.of(footprint, job, rates) for config, footprint in footprints.items()}
            # Trials of this search's own workload and stack are left out: the search recalls them one by one.
            own_keys = (job.workload.key, job.stack.key)
            predicted = store.predicted(hardware_key=job.hardware.key, latest=COMPARED)
            foreign = (trial for trial in predicted if (trial.workload.key, trial.stack.key) != own_keys)
            earlier = [trial for trial in foreign if trial.workload.program == job.workload.program]
            of_step = {c: e.prediction for c, e in estimates.items()}
            for config, slower in self._emulated.items():
                if config not in estimates and _in_fp32(config) in estimates:
                    of_step[config] = _from_fp32(config, of_step[_in_fp32(config)], slower)
            by_config = {config: as_of_program(prediction, job) for config, prediction in of_step.items()}
            deviation = learned(earlier, nothing_compared(job.hardware, job.workload.devices))
            predictions = Predictions(by_config=by_config, memory_deviation=deviation)
        except Exception as failure:
            _log.warning("autofit: continuing without predictions, which failed: %s", in_one_line(failure))
            return self._by_formula(possible)
        others = self._by_formula([c for c in possible if c not in estimates])
        # On a cluster Ray chooses each trial's machine, so each trial is judged as if alone there.
        is_one_host = self.request.ray_address is None
        return replace(
            predictions,
            beyond_host={
                **others.beyond_host,
                **{c: e.host_short_bytes for c, e in estimates.items() if e.host_short_bytes},
            },
            host_bytes={c: e.machine_host_bytes for c, e in estimates.items()},
            shared_host_bytes=(job.hardware.host_memory_bytes or None) if is_one_host else None,
        )

    def _by_formula(self, configs: Sequence[Config]) -> Predictions:
        """Predictions without a trace: which of these offload more than the host holds. A failure costs only that."""
        offloading = [config for config in configs if config["offload"] != "none"]
        if not offloading:
            return Predictions()
        try:
            from autofit.estimate.sharding.hosted import host_short_bytes  # PyTorch with it, which takes seconds

            lacking = {config: host_short_bytes(config, self.plan.job) for config in offloading}
        except Exception as failure:
            _log.warning("autofit: the host's memory is not held against the configs: %s", in_one_line(failure))
            return Predictions()
        return Predictions(beyond_host={config: size for config, size in lacking.items() if size})

    def _prepared(self) -> tuple[EstimateCache, list[Config], set[Config]]:
        """The estimates made before, the configs to predict, and those of them whose estimates are not worth making.
        The device is probed first: whatever is begun before would disturb that."""
        job, store, possible, seconds = self.plan.job, self.store, self.plan.possible, self.plan.limits.seconds
        if self._cache is None:
            # Of a device for which nothing is estimated, rates are of no use.
            is_here = self.request.ray_address is None and is_detected(job.hardware)
            if self.probes and is_here and not_estimated(job.hardware) is None:
                make_sure(job, store, budget_seconds=seconds)
            recorded = store.attempts(**context_keys(job.hardware, job.stack, job.workload))
            may_fit = set(possible)
            self._tried = [c for c in self.plan.lattice.configs if c in recorded and c not in may_fit]
            self._emulated = _emulated_configs(possible, stored_probe(job.hardware, job.stack, store, job.model.digest))
            self._cache = EstimateCache(as_trials_show(job, store), store)
        only_known = {*self._emulated, *self._tried}
        if seconds is not None and ESTIMATING_SHARE * seconds < FIRST_ESTIMATES_SECONDS:
            only_known.update(possible)  # those made before cost nothing
        return self._cache, [*possible, *self._tried], only_known


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


def _in_fp32(config: Config) -> Config:
    return config.replace(precision="fp32")


def _emulated_configs(configs: Iterable[Config], probe: Probe | None) -> dict[Config, float]:
    """The configs in a number format that the device emulates so slowly that they are not practical, if the same in
    fp32 is among `configs`; each with how many times slower products are. They are predicted from the same in fp32: two
    thirds of a space are in 16 bits, and tracing them all would take most of the time before the first trial."""
    if probe is None:
        return {}
    every = dict.fromkeys(configs)
    ratios = times_as_slow_as_fp32(probe)
    slower = {config: ratios.get(product_format(config), 1.0) for config in every}
    return {c: ratio for c, ratio in slower.items() if ratio * PRACTICAL > 1.0 and _in_fp32(c) in every}


def _from_fp32(config: Config, same_in_fp32: Prediction, slower: float) -> Prediction:
    """The prediction for `config` from that for the same config in fp32, in which products are so many times faster. It
    has no work, so that no trial of it corrects the device's rates."""
    # Training in 16 bits throughout takes half the memory of fp32, and what does not shrink.
    share = 0.6 if config["precision"] == "bf16" else 1.0
    return replace(
        same_in_fp32,
        peak_allocated_bytes=int(share * same_in_fp32.peak_allocated_bytes),
        peak_reserved_bytes=None,
        device_bytes=int(share * same_in_fp32.device_bytes),
        step_seconds=same_in_fp32.step_seconds and slower * same_in_fp32.step_seconds,
        micro_step_seconds=same_in_fp32.micro_step_seconds and slower * same_in_fp32.micro_step_seconds,
        work=None,
        # Mixed precision keeps weights in fp32 and activations in 16 bits.
        memory_error=0.5,
    )
