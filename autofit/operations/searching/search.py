"""A search from the user's request to the recommendation."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from autofit.operations.searching.result import SearchResult
from autofit.operations.searching.resume import (
    Driver,
    answered_by,
    answered_plan,
    begin,
    remaining_limits,
    repeat_findings,
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
    from autofit.search.loop import SearchLoop
    from autofit.search.progress import Progress


def search(
    request: SearchRequest,
    report: Callable[[Progress], None] = lambda progress: None,
    *,
    driver: Driver | None = None,
) -> SearchResult:
    """Search for the fastest config that fits.

    Every trial is committed as it ends, so that after an interruption or a kill the same request resumes from there.
    `driver` has the lease if a runner has claimed the search, and its store is used. Raises `NothingFits` if nothing
    fits, `EnvironmentLacks` if the machine cannot run trials, no trial could end within the time budget, or another
    process drives the same search, `LeaseLost` if the search is cancelled.
    """
    started = time.monotonic()
    opened = None if driver is None else driver.store
    known_plan = answered_plan(request, opened)
    on_cluster = request.ray_address is not None and known_plan is None
    with ExitStack() as stack:
        pool = stack.enter_context(closing(open_pool(request))) if on_cluster else None
        plan = known_plan or resolve(request, pool)
        store = opened or stack.enter_context(Store.open(request.store))
        import_rescued(store)
        if driver is not None:
            begin(request, plan, store, driver.lease)
        search_id = answered_by(request, plan, store)
        if search_id is not None:
            loop = _answer_again(search_id, request, plan, store, driver, report)
        else:
            driver = driver or stack.enter_context(Driver(store, begin(request, plan, store)))
            loop = _drive(driver, request, plan, store, pool, report)
            search_id = driver.lease.search_id
        result = SearchResult.of(loop, store, search_id, started)
        if driver is not None:
            driver.result = result
        return result


def _answer_again(
    search_id: str,
    request: SearchRequest,
    plan: Plan,
    store: Store,
    driver: Driver | None,
    report: Callable[[Progress], None],
) -> SearchLoop:
    """Answer from the trials and findings of the search that has answered before; nothing is run."""
    from autofit.search.loop import SearchLoop

    loop = SearchLoop(
        plan=plan,
        predictor=ReadyMade(),
        log=StoredTrials(store, search_id, heartbeat=driver),
        open_pool=partial(open_pool, request),
        report=report,
    )
    if driver is not None:
        driver.loop = loop
    loop.answer()
    repeat_findings(loop, store, search_id)
    return loop


def _drive(
    driver: Driver,
    request: SearchRequest,
    plan: Plan,
    store: Store,
    pool: Pool | None,
    report: Callable[[Progress], None],
) -> SearchLoop:
    """Run the trials that are worth it, within what earlier drivers have left of the limits.

    `pool` has the workers of a cluster; others are started for the first trial.
    """
    from autofit.search.loop import SearchLoop
    from autofit.workers.cluster.connection import check_installed

    if pool is not None:
        machine_link.make_sure(plan.job, store, pool, fresh=request.fresh)
        pool.claim(driver.lease.search_id, driver.lease.epoch, usual_rates(plan.job, store))
    if not request.in_place:
        check_installed()  # before a probe, which takes seconds
    plan = replace(plan, limits=remaining_limits(driver.lease, plan.limits))
    predictor = LatticePredictor(plan=plan, request=request, store=store, probes=True)

    def workers() -> Pool:
        """Meanwhile what predicting needs is loaded."""
        predictor.get_ready()
        return open_pool(request) if pool is None else pool

    driver.loop = SearchLoop(
        plan=plan,
        predictor=predictor,
        log=StoredTrials(store, driver.lease.search_id, fresh=request.fresh, heartbeat=driver),
        open_pool=workers,
        report=report,
    )
    driver.begin_spending()
    driver.loop.run()
    return driver.loop


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
