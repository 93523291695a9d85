"""A search from the user's request to the recommendation."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from autofit.operations.searching.result import SearchResult, result_of
from autofit.operations.searching.resume import (
    Claimed,
    DrivenSearch,
    answered_plan,
    begin,
    remaining_limits,
    repeat_findings,
    results,
)
from autofit.planning.plan import Plan, resolve
from autofit.planning.requests import SearchRequest
from autofit.prediction import machine_link
from autofit.prediction.lattice_predictor import LatticePredictor
from autofit.prediction.predictions import ReadyMade
from autofit.prediction.probing import usual_rates
from autofit.store import Store
from autofit.store.trial_log import StoredTrials, import_rescued
from autofit.trial.machine.detection import requested_card
from autofit.workers.pool import Pool

if TYPE_CHECKING:
    from autofit.search.progress import Progress


def search(
    request: SearchRequest,
    report: Callable[[Progress], None] = lambda progress: None,
    *,
    driving: DrivenSearch | None = None,
) -> SearchResult:
    """Search for the fastest config that fits.

    Every trial is committed as it ends, so that after an interruption or a kill the same request resumes from there.
    `driving` has the lease if a runner has claimed the search. Raises `NothingFits` if nothing fits, `EnvironmentLacks`
    if the machine cannot run trials, no trial could end within the time budget, or another process drives the same
    search, `LeaseLost` if the search is cancelled.
    """
    started = time.monotonic()
    answered = answered_plan(request)
    on_cluster = request.ray_address is not None and answered is None
    pool = open_pool(request) if on_cluster else None
    try:
        plan = answered or resolve(request, pool)
        with Store.open(request.store) as store:
            import_rescued(store)
            runner_lease = None if driving is None else driving.lease
            claimed = begin(request, plan, store, runner_lease)
            with ExitStack() as stack:
                if driving is None and claimed.lease is not None:
                    driving = stack.enter_context(DrivenSearch(store, claimed.lease))
                if pool is not None and claimed.lease is not None and not claimed.is_answered:
                    machine_link.make_sure(plan.job, store, pool, fresh=request.fresh)
                    pool.claim(claimed.lease.search_id, claimed.lease.epoch, usual_rates(plan.job, store))
                plan = replace(plan, limits=remaining_limits(claimed.lease, plan.limits))
                return _run(request, plan, store, claimed, driving=driving, pool=pool, report=report, started=started)
    finally:
        if pool is not None:
            pool.close()


def open_pool(request: SearchRequest) -> Pool:
    """The workers that a request asks for."""
    if request.in_place:
        from autofit.workers.in_place import InPlacePool

        return InPlacePool(device=request.device, devices=request.workload.devices)
    from autofit.workers.ray_pool import RayPool

    card = None if request.ray_address is None else requested_card(request.hardware)
    return RayPool(
        address=request.ray_address,
        workers=request.workers,
        devices=request.workload.devices,
        device=request.device,
        card=card,
    )


def _run(
    request: SearchRequest,
    plan: Plan,
    store: Store,
    claimed: Claimed,
    *,
    driving: DrivenSearch | None,
    pool: Pool | None,
    report: Callable[[Progress], None],
    started: float,
) -> SearchResult:
    """Run a search that has begun, or repeat what it found before.

    The limits of `plan` are what earlier drivers have left; `pool` has the workers of a cluster, others are started for
    the first trial.
    """
    from autofit.search.loop import SearchLoop
    from autofit.workers.cluster.connection import check_installed

    if not claimed.is_answered and not request.in_place:
        check_installed()  # before a probe, which takes seconds
    predictor = None if claimed.is_answered else LatticePredictor(plan=plan, request=request, store=store, probes=True)

    def workers() -> Pool:
        """Meanwhile what predicting needs is loaded."""
        if predictor is not None:
            predictor.get_ready()
        return open_pool(request) if pool is None else pool

    search_run = SearchLoop(
        plan=plan,
        predictor=predictor or ReadyMade(),
        log=StoredTrials(store, claimed.search_id, fresh=request.fresh, heartbeat=driving),
        open_pool=workers,
        report=report,
    )
    try:
        if claimed.is_answered:
            search_run.answer()
            repeat_findings(search_run, store, claimed.search_id)
        else:
            if driving is not None:
                driving.begin_spending()
            search_run.run()
        result = result_of(search_run, store, claimed.search_id, started)
    finally:
        if driving is not None:
            driving.result |= results(search_run)
    if driving is not None:
        driving.result["recommendation"] = result.recommendation.to_json()
    return result
