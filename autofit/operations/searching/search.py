"""A search from the user's request to the recommendation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from autofit.core.document import Document
from autofit.core.errors import EnvironmentLacks, UsageError
from autofit.core.frontier import Frontier, Recommendation
from autofit.core.lattice import Config
from autofit.core.outcome import Crashed, Diverged, Fits, OutOfMemory, TimedOut, Trial, context_keys
from autofit.core.units import format_bytes, format_duration
from autofit.operations.recommendation import recommendation
from autofit.operations.searching.disturbed import Disturbed
from autofit.operations.searching.impractical import emulated_formats, impractical_methods
from autofit.operations.searching.resume import Claimed, begin, remaining_limits, repeat_findings, results
from autofit.operations.service.driven_search import DrivenSearch
from autofit.planning.nothing_fits import Shortfall, levers, of_failures
from autofit.planning.plan import Plan, resolve
from autofit.planning.requests import SearchRequest
from autofit.prediction.lattice_predictor import LatticePredictor
from autofit.prediction.predictions import ReadyMade
from autofit.prediction.probing import usual_rates
from autofit.store import Store
from autofit.store.trial_log import StoredTrials
from autofit.trial.machine.detection import requested_card
from autofit.workers.pool import Pool

if TYPE_CHECKING:
    # Imported where it is used: Optuna takes a quarter of a second, which an answer from the store need not wait for.
    from autofit.search.loop import SearchLoop
    from autofit.search.progress import Progress

SOONER = "what would help: a longer --time-budget, or a smaller --global-batch or --seq-len"
"""For when trials take longer than there is time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult(Document):
    """How a search ended."""

    search_id: str
    recommendation: Recommendation
    frontier: Frontier
    trials: int
    """Trials that this search ran, verification included."""
    out_of_memory: int
    ruled_out: int
    answered_from_store: int
    seconds: float
    stopped_because: str
    regret_bound: float | None = None
    """Upper bound, with 95 % confidence, on how much slower the recommended config is than the best of its method, as a
    share of the best's speed; None if the search that found it did not say."""
    disturbed: Disturbed = field(default_factory=Disturbed)
    emulated: tuple[str, ...] = ()
    """What a probe says of the number formats among the search's that the device only emulates, a sentence each."""
    unsupported: Mapping[str, int] = field(default_factory=dict)
    """Reason -> number of configs of the space that were left out because they cannot work here."""
    beyond_goal: int = 0
    """Number of configs that were left out because they change more than the user allows."""
    impractical: tuple[str, ...] = ()
    """A sentence for each more faithful method than the recommended one whose trials were all ended as too slow."""


def search(
    request: SearchRequest,
    report: Callable[[Progress], None] = lambda progress: None,
    *,
    driving: DrivenSearch | None = None,
    campaign_id: str | None = None,
) -> SearchResult:
    """Search for the fastest config that fits.

    Every trial is committed as it ends, so that after an interruption or a kill the same request resumes from there.
    `driving` has the lease if a runner has claimed the search; searches that are asked for together share a campaign.
    Raises `NothingFits` if nothing fits, `EnvironmentLacks` if the machine cannot run trials or another process drives
    the same search, `UsageError` if no trial could end within the time budget, `LeaseLost` if the search is cancelled.
    """
    started = time.monotonic()
    pool = open_pool(request) if request.ray_address is not None else None
    try:
        plan = resolve(request, pool)
        with Store.open(request.store) as store:
            runner_lease = None if driving is None else driving.lease
            claimed = begin(request, plan, store, runner_lease, campaign_id)
            with ExitStack() as stack:
                if driving is None and claimed.lease is not None:
                    driving = stack.enter_context(DrivenSearch(store, claimed.lease))
                if pool is not None and claimed.lease is not None and not claimed.is_answered:
                    pool.claim(claimed.lease.search_id, claimed.lease.epoch, usual_rates(plan.job, store))
                plan = replace(plan, limits=remaining_limits(claimed.lease, plan.limits))
                return _run(request, plan, store, claimed, driving=driving, pool=pool, report=report, started=started)
    finally:
        if pool is not None:
            pool.close()


def open_pool(request: SearchRequest) -> Pool:
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
    predictor = None if claimed.is_answered else LatticePredictor.of(plan, request, store, probes=True)

    def workers() -> Pool:
        """Meanwhile what predicting needs is loaded."""
        if pool is None and not request.in_place:
            import autofit.workers.ray_pool  # noqa: F401  # a machine without Ray is told before it is probed
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
            search_run.run()
        result = _result(search_run, plan, store, claimed.search_id, started)
    finally:
        if driving is not None:
            driving.result |= results(search_run)
    if driving is not None:
        driving.result["recommendation"] = result.recommendation.to_json()
    return result


def _result(search_run: SearchLoop, plan: Plan, store: Store, search_id: str, started: float) -> SearchResult:
    job = plan.job
    trials: list[Trial] = list(search_run.state.trials.values())
    _check_any_is_measured(search_run)
    if not trials:
        _check_any_could_run(search_run)
    every = store.trials(search_id=search_id)
    _check_any_is_of_its_type(trials, every)
    _check_any_fits(trials or every, plan)
    # Counted as `frontier` counts them: every attempt of this hardware, stack and workload.
    context = context_keys(job.hardware, job.stack, job.workload)
    frontier = Frontier.of(
        search_run.state.measured(),
        hardware=job.hardware,
        workload=job.workload,
        stack=job.stack,
        trials=store.count(**context),
        out_of_memory=store.count(**context, outcome=OutOfMemory.kind),
        contradictory=search_run.state.contradictory,
    )
    formats = emulated_formats(job, plan.lattice.configs, store)
    recommended = recommendation(
        frontier, memory_limit_bytes=plan.limits.memory_bytes, goal=plan.goal, tried=lambda: trials
    )
    return SearchResult(
        search_id=search_id,
        recommendation=recommended,
        frontier=frontier,
        trials=search_run.progress.done,
        out_of_memory=search_run.progress.out_of_memory,
        ruled_out=search_run.progress.ruled_out,
        answered_from_store=search_run.progress.from_store,
        seconds=time.monotonic() - started,
        stopped_because=search_run.progress.stopped_because,
        regret_bound=search_run.progress.regret_bound,
        disturbed=Disturbed.of(every, trials, search_run.progress.slow_nodes),
        emulated=tuple(formats.values()),
        unsupported=plan.unsupported,
        beyond_goal=plan.beyond_goal,
        impractical=impractical_methods(
            search_run.state,
            recommended=recommended.point.method,
            tokens_per_step=job.workload.tokens_per_step,
            emulated_formats=formats,
        ),
    )


def _check_any_is_measured(search_run: SearchLoop) -> None:
    """Raise an error if trials were too slow to be finished, and nothing else has shown a config that fits."""
    state = search_run.state
    bounds = state.least_step_seconds
    if not bounds or state.points():
        return
    config, least = min(bounds.items(), key=lambda item: item[1])
    reason = f"a step takes at least {format_duration(least)} with {config}"
    if state.out_of_memory:
        reason += f"; {state.out_of_memory} configs ran out of memory"
    raise Shortfall(
        f"no trial could be finished in the time: {reason}; {SOONER}",
        memory_limit_bytes=search_run.plan.limits.memory_bytes,
        closest={"config": config.to_json(), "provenance": "measured", "least_step_seconds": least},
    )


def _check_any_could_run(search_run: SearchLoop) -> None:
    """Raise an error that says why a search of which nothing is known, from now or before, has run nothing: the host is
    too small for every config, or the time budget too short for any."""
    if not search_run.state.open:
        if search_run.beyond_host:
            raise _host_too_small(search_run.beyond_host, search_run.plan)
        return
    if search_run.kept_waiting is not None:
        raise EnvironmentLacks(
            f"no trial was run: {search_run.kept_waiting}",
            remedy="let the other trial or search end first, or give this one a longer --time-budget",
        )
    budget, quickest = search_run.plan.limits.seconds, search_run.quickest()
    if budget is not None and quickest is not None:
        takes = format_duration(quickest.expected_seconds)
        done = search_run.progress.done
        what = f"none of {done} trials ended in its time" if done else "no trial was run"
        raise UsageError(
            f"{what}: the quickest that may fit is expected to take {takes}, which is more than predicting and trials "
            f"left of the time budget of {format_duration(budget)} ({quickest.config}); {SOONER}"
        )


def _host_too_small(beyond_host: Mapping[Config, int], plan: Plan) -> Shortfall:
    """The error when nothing was run because what the devices would hold is predicted to exceed the host's memory."""
    config, lacking = min(beyond_host.items(), key=lambda item: item[1])
    host_bytes = plan.job.hardware.host_memory_bytes
    return Shortfall(
        f"no config of {plan.job.model.name} is predicted to fit: the one that needs the least host memory needs "
        f"{format_bytes(host_bytes + lacking)}, and a machine has {format_bytes(host_bytes)} ({config})",
        memory_limit_bytes=plan.limits.memory_bytes,
        closest={"config": config.to_json(), "provenance": "predicted", "over_limit_bytes": lacking},
    )


def _check_any_is_of_its_type(settled: Sequence[Trial], every: Iterable[Trial]) -> None:
    """Raise `EnvironmentLacks` where all that fitted ran on nodes that are slower than their type: that says nothing of
    what fits."""
    aside = [trial for trial in every if trial.why_set_aside and isinstance(trial.outcome, Fits)]
    if aside and not any(isinstance(trial.outcome, Fits) for trial in settled):
        raise EnvironmentLacks(
            f"all {len(aside)} trials that fitted ran where {aside[-1].why_set_aside}",
            remedy="mend or remove that node and run the same command again, with more --max-trials or --time-budget",
        )


def _check_any_fits(trials: list[Trial], plan: Plan) -> None:
    """If no trial has fitted and some failed for a reason other than memory, raise an error that says what failed.

    If every trial crashed, it is the environment that lacks something, not memory.
    """
    failed = [t.outcome for t in trials if isinstance(t.outcome, Crashed | TimedOut | Diverged)]
    if not failed or any(isinstance(t.outcome, Fits) for t in trials):
        return
    last = failed[-1]
    message = (
        f"no trial has fitted, and {len(failed)} of {len(trials)} failed for reasons other than memory, the last: "
        f"{last.kind.replace('_', ' ')}: {' '.join(last.reason.split())}"
    )
    if all(isinstance(t.outcome, Crashed) for t in trials):
        raise EnvironmentLacks(message, remedy="autofit doctor, and --fresh to try them again")
    limit, job = plan.limits.memory_bytes, plan.job
    closest = of_failures(trials, limit)
    if len(failed) < len(trials):
        message += (
            f"; {closest.text}; {levers(plan.goal, job.workload, job.hardware, beyond_bytes=closest.beyond_bytes)}"
        )
    hung = all(isinstance(outcome, TimedOut) for outcome in failed)
    help_ = SOONER if hung else "`autofit doctor` may say more"
    raise Shortfall(f"{message}; {help_}", memory_limit_bytes=limit, closest=closest.document)
