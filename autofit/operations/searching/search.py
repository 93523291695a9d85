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
    from autofit.search.acquisition.sampler import LatticeSampler
    from autofit.search.loop import SearchLoop
    from autofit.search.progress import Progress


def search(
    request: SearchRequest, report: Callable[[Progress], None] = lambda progress: None, *, driver: Driver | None = None
) -> SearchResult:
    """Search for the fastest config that fits.

    Every trial is stored as it ends: after an interruption the same request goes on. `driver` has the lease if a runner
    has claimed the search, and its store is used. Raises `NothingFits`, `EnvironmentLacks` if no trial could run or end
    here, or another process drives the search, and `LeaseLost` if it is cancelled.
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
        if search_id is not None:  # from the trials and findings of that search: nothing is run
            from autofit.search.loop import SearchLoop

            log = StoredTrials(store, search_id, heartbeat=driver)
            loop = SearchLoop(
                plan=plan, predictor=ReadyMade(), log=log, open_pool=partial(open_pool, request), report=report
            )
            if driver is not None:
                driver.loop = loop
            loop.answer()
            repeat_findings(loop, store, search_id)
        else:
            driver = driver or stack.enter_context(Driver(store, begin(request, plan, store)))
            loop = _drive(driver, request, plan, pool, report)
            search_id = driver.lease.search_id
        result = SearchResult.of(loop, store, search_id, started)
        if driver is not None:
            driver.result = result
        return result


def _drive(
    driver: Driver, request: SearchRequest, plan: Plan, pool: Pool | None, report: Callable[[Progress], None]
) -> SearchLoop:
    """Run the trials that are worth it, within the limits that are left; a cluster's on the workers of `pool`."""
    from autofit.search.loop import SearchLoop
    from autofit.workers.cluster.connection import check_installed

    if pool is not None:
        machine_link.make_sure(plan.job, driver.store, pool, fresh=request.fresh)
        pool.claim(driver.lease.search_id, driver.lease.epoch, usual_rates(plan.job, driver.store))
    if not request.in_place:
        check_installed()  # before a probe, which takes seconds
    plan = replace(plan, limits=remaining_limits(driver.lease, plan.limits))
    predictor = LatticePredictor(plan=plan, request=request, store=driver.store, probes=True)

    def workers() -> Pool:
        """Meanwhile what predicting needs is loaded."""
        predictor.get_ready()
        return open_pool(request) if pool is None else pool

    driver.loop = SearchLoop(
        plan=plan,
        predictor=predictor,
        log=StoredTrials(driver.store, driver.lease.search_id, fresh=request.fresh, heartbeat=driver),
        open_pool=workers,
        report=report,
    )
    driver.begin_spending()
    driver.loop.run()
    return driver.loop


def lattice_sampler(request: SearchRequest) -> LatticeSampler:
    """What chooses the configs of a search for `request`, for an Optuna study whose objective trains as the user does.

    Trials of the store correct the predictions, but the request's own are not recalled: such an objective may measure
    something else. Raises `NothingFits` if nothing can fit.
    """
    from autofit.search.acquisition.acquisition import Acquisition
    from autofit.search.acquisition.sampler import LatticeSampler
    from autofit.search.lattice_state import LatticeState

    plan = resolve(request)
    state = LatticeState.of(plan)
    acquisition = Acquisition(plan, state)
    with Store.open(request.store) as store:
        predictor = LatticePredictor(plan=plan, request=request, store=store)
        predictions = predictor.predict(lambda done, total: None)
    state.rule_out(dict.fromkeys(predictions.beyond_host, "host memory is predicted not to suffice"))
    acquisition.use(predictions)
    return LatticeSampler(state, acquisition, plan.job)


def open_pool(request: SearchRequest) -> Pool:
    if request.in_place:
        from autofit.workers.in_place import InPlacePool

        return InPlacePool(device=request.device, devices=request.workload.devices)
    from autofit.workers.ray_pool import RayPool

    return RayPool(
        address=request.ray_address,
        workers=request.workers,
        devices=request.workload.devices,
        device=request.device,
        card=None if request.ray_address is None else requested_card(request.hardware),
    )
