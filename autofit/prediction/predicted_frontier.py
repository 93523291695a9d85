"""The frontier that a search is predicted to find: nothing is run, and the hardware need not be in this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autofit.core.errors import Shortfall
from autofit.core.frontier import Alternative, alternatives_to, best, frontiers, speed
from autofit.core.lattice import Config
from autofit.core.units import format_bytes
from autofit.core.workload import Goal
from autofit.estimate.estimate import Estimate
from autofit.planning.nothing_fits import holder
from autofit.planning.plan import Plan, check_dry_run, outline, resolve, resolve_for
from autofit.planning.requests import SearchRequest, memory_limit
from autofit.prediction.calibration import Calibration, not_estimated
from autofit.prediction.estimate_cache import EstimateCache, readable
from autofit.prediction.estimation import site
from autofit.prediction.helpful_changes import GAIN
from autofit.prediction.predict_configs import predict_all
from autofit.techniques import Job, changes
from autofit.trial.machine.detection import requested_card


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedChoice:
    """What would be recommended if every prediction came true."""

    estimate: Estimate
    changes_training: tuple[str, ...]
    """What differs from the plain recipe in numerics or training, one sentence each."""
    alternatives: tuple[Alternative[Estimate], ...]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, with the keys of a measured recommendation."""
        return {
            "config": self.estimate.config.to_json(),
            "provenance": "predicted",
            "estimate": self.estimate.to_json(),
            "headroom_bytes": self.estimate.headroom_bytes,
            "changes_training": list(self.changes_training),
            "alternatives": [
                {
                    "role": alternative.role,
                    "config": alternative.point.config.to_json(),
                    "estimate": alternative.point.short_json(),
                    "over_limit_bytes": alternative.over_limit_bytes,
                    "speedup": alternative.speedup,
                }
                for alternative in self.alternatives
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedFrontier:
    """The predicted frontiers of full, LoRA and QLoRA training side by side."""

    plan: Plan
    """The hardware, the workload and the lattice."""
    not_predicted: dict[str, int]
    """Reason -> number of configs of the lattice that cannot be estimated for that reason."""
    fitting: int
    """Number of configs predicted to fit."""
    points: tuple[Estimate, ...]
    """Sorted by memory; each is undominated among those of its own method."""
    recommendation: PredictedChoice | None
    """None if no speed could be predicted."""
    seconds: float
    """How long the prediction took."""

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `outline`, with the predictions."""
        return {
            "provenance": "predicted",
            **outline(self.plan),
            "not_predicted": dict(self.not_predicted),
            "fitting": self.fitting,
            "frontier": [{"config": p.config.to_json(), "estimate": p.to_json()} for p in self.points],
            "recommendation": None if self.recommendation is None else self.recommendation.to_json(),
            "seconds": self.seconds,
        }


def predict_frontier(
    request: SearchRequest, report: Callable[[int, int], None] = lambda done, total: None
) -> PredictedFrontier:
    """Predict every config that a search would consider, on a catalog card or on this machine's device.

    `report` is called with the number of configs predicted so far and their total. Raises `NothingFits` if none is
    predicted to fit.
    """
    started = time.monotonic()
    check_dry_run(request)
    plan = _planned(request)
    job, limit = plan.job, plan.limits.memory_bytes
    configs, reason = plan.lattice.configs, not_estimated(job.hardware)
    possible = plan.possible if reason is None else []
    with readable(request.store, create=True) as store:
        calibration = Calibration.of(job, store)
        cache = EstimateCache(calibration.job, store)
        footprints = predict_all(cache, possible, memory_limit_bytes=limit, report=report)
    predicted = {config: calibration.estimate(footprint) for config, footprint in footprints.items()}
    estimates = list(predicted.values())
    fitting = [e for e in estimates if e.fits]
    if estimates and not fitting:
        raise _shortfall(estimates, job)
    worthwhile = [e for e in estimates if not _gains_nothing(e, predicted)]
    return PredictedFrontier(
        plan=plan,
        not_predicted={} if reason is None else {reason: len(configs)},
        fitting=len(fitting),
        points=frontiers(e for e in worthwhile if e.fits),
        recommendation=recommended(worthwhile, request.goal),
        seconds=time.monotonic() - started,
    )


def predicted_recommendation(request: SearchRequest) -> dict[str, Any] | None:
    """What a search is predicted to recommend, with the keys of a measured recommendation; None if no speed can be
    predicted. Raises `UsageError`, and `NothingFits`."""
    frontier = predict_frontier(request)
    if frontier.recommendation is None:
        return None
    job = frontier.plan.job
    return {
        **frontier.recommendation.to_json(),
        "memory_limit_bytes": frontier.plan.limits.memory_bytes,
        **{name: getattr(job, name).to_json() for name in ("hardware", "workload", "stack")},
    }


def recommended(estimates: Sequence[Estimate], goal: Goal) -> PredictedChoice | None:
    """The choice that `frontier.best` makes of what is likely to fit or, if nothing is, of what may; speeds within
    `GAIN` tie. None if nothing may fit or no speed is known."""
    surely = any(e.likely_fits and e.tokens_per_second is not None for e in estimates)

    def fits(estimate: Estimate) -> bool:
        return (estimate.likely_fits if surely else estimate.fits) and estimate.tokens_per_second is not None

    def ties(estimate: Estimate, fastest: Estimate) -> bool:
        return speed(estimate) >= speed(fastest) * (1 - GAIN)

    def of(methods: Sequence[str]) -> Estimate | None:
        return best(filter(fits, estimates), methods=methods, ties=ties, changes=lambda c: len(changes(c, goal)))

    chosen = of(goal.methods)
    if chosen is None:
        return None
    return PredictedChoice(
        estimate=chosen,
        changes_training=changes(chosen.config, goal),
        alternatives=alternatives_to(
            chosen,
            estimates,
            memory_limit_bytes=chosen.memory_limit_bytes,
            fits=fits,
            best_of=lambda method: of([method]),
            least_speedup=1 + GAIN,
        ),
    )


def _gains_nothing(flash: Estimate, estimates: Mapping[Config, Estimate]) -> bool:
    """Whether an estimate with the flash-attn package, which few have, is hardly better than with torch's attention."""
    if flash.config.get("attention") != "flash":
        return False
    plain = estimates.get(flash.config.replace(attention="sdpa"))
    # Differences in memory below 1 % do not count.
    if plain is None or plain.fits != flash.fits or plain.device_bytes > flash.device_bytes * 1.01:
        return False
    return plain.tokens_per_second is None or speed(plain) >= speed(flash) * (1 - GAIN)


def _planned(request: SearchRequest) -> Plan:
    """The plan of a search on a catalog card as if this machine had it, or else on this machine's device."""
    if requested_card(request.hardware, request.device) is None:
        return resolve(request)
    job = request.workload.job(site(request.hardware))
    return resolve_for(request, job, memory_limit(request.memory_limit_bytes, job.hardware, request.workload.devices))


def _shortfall(estimates: Sequence[Estimate], job: Job) -> Shortfall:
    """The error when every config is predicted to exceed a limit: which config needs least, and what could hold it."""
    lightest = min(estimates, key=lambda e: (e.host_short_bytes, e.device_bytes))
    limit, over = lightest.memory_limit_bytes, -lightest.headroom_bytes
    if lightest.fits_device and lightest.host_memory_bytes is not None:
        over = lightest.host_short_bytes
        shortage = (
            f"to fit: the lightest that fits the devices needs {format_bytes(lightest.machine_host_bytes)} of host "
            f"memory, and the host has {format_bytes(lightest.host_memory_bytes)} ({lightest.config})"
        )
    else:
        needed = int(lightest.device_bytes * (1.0 + lightest.memory_error))
        shortage = (
            f"to fit {format_bytes(limit)}: the lightest needs {format_bytes(lightest.device_bytes)} "
            f"({lightest.config}); {holder(needed, job.hardware)}"
        )
    return Shortfall(
        f"no config of {job.model.name} is predicted {shortage}",
        memory_limit_bytes=limit,
        closest={
            "config": lightest.config.to_json(),
            "provenance": "predicted",
            "estimate": lightest.short_json(),
            "over_limit_bytes": over,
        },
    )
