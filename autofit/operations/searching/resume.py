"""Searches in the store: one that has already answered the question, one to resume, and how each ends."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from autofit.core.errors import AutofitError, NothingFits, Shortfall, StoreError, UsageError, in_one_line
from autofit.operations.service.submission import digest_of
from autofit.planning.plan import Limits, Plan, resolve_for
from autofit.planning.requests import SearchRequest, memory_limit
from autofit.store import Heartbeat, Lease, LeaseLost, NoStore, Store, new_owner
from autofit.store import Search as StoredSearch
from autofit.trial.machine.detection import installed_stack, requested_card

if TYPE_CHECKING:
    # Imported where it is used: Optuna takes a quarter of a second, which an answer from the store need not wait for.
    from autofit.search.loop import SearchLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A search that this process may drive, or one that the store answers."""

    search_id: str
    """The search whose trials and findings are to be read."""
    lease: Lease | None
    """None where nothing is to be written: an earlier search has answered."""
    is_answered: bool


def begin(request: SearchRequest, plan: Plan, store: Store, runner_lease: Lease | None = None) -> Claimed:
    """Store the search as running unless an earlier one has already answered it; `runner_lease` is a runner's claim.

    Raises `UnderWay` if another process drives the same search.
    """
    job = plan.job
    question = request.question(job, plan.limits.memory_bytes, plan.lattice_digest)
    stored = store.searches(stack_key=job.stack.key, workload_key=job.workload.key)
    alike = [earlier for earlier in stored if earlier.request.get("question") == question]
    answered = None if request.fresh else _already_answered(alike, request)
    if answered is not None and runner_lease is None:
        return Claimed(search_id=answered, lease=None, is_answered=True)
    resumed = _resumable_fresh(alike) if request.fresh else None
    lease = store.queue.begin(
        resumed or uuid.uuid4().hex if runner_lease is None else runner_lease.search_id,
        new_owner() if runner_lease is None else runner_lease.owner,
        digest=digest_of(request, job.workload, job.hardware.name),
        hardware=job.hardware,
        stack=job.stack,
        workload=job.workload,
        request={
            "question": question,
            "fresh": request.fresh,
            "max_trials": request.max_trials,
            "seconds": request.time_budget_seconds,
        },
        campaign_id=request.campaign_id,
    )
    return Claimed(search_id=answered or lease.search_id, lease=lease, is_answered=answered is not None)


def answered_plan(request: SearchRequest) -> Plan | None:
    """The plan of a cluster's search that the store answers, so that it need not wait for a device: for a card that is
    named, under the versions that are installed here, as on all nodes. None if the cluster must be asked."""
    wanted = None if request.ray_address is None or request.fresh else requested_card(request.hardware, request.device)
    if wanted is None:
        return None
    _, workload = request.workload.resolve()
    with suppress(NoStore), Store.open(request.store, create=False) as store:
        stored = store.searches(stack_key=installed_stack().key, workload_key=workload.key)
        answers = filter(_is_answer, stored)
        sites = [(s.hardware, s.stack) for s in answers if s.hardware is not None and s.stack is not None]
        for hardware, stack in dict.fromkeys(site for site in sites if site[0].name == wanted.name):
            job = request.workload.job((hardware, stack))
            try:
                limit = memory_limit(request.memory_limit_bytes, job.hardware, workload.devices)
                plan = resolve_for(request, job, limit)
            except (UsageError, NothingFits):  # today's nodes may have more
                continue
            question = request.question(job, plan.limits.memory_bytes, plan.lattice_digest)
            alike = [earlier for earlier in stored if earlier.request.get("question") == question]
            if _already_answered(alike, request) is not None:
                return plan
    return None


def remaining_limits(lease: Lease | None, limits: Limits) -> Limits:
    """What earlier drivers of the search have left of its limits."""
    if lease is None:
        return limits
    trials = None if limits.max_trials is None else max(0, limits.max_trials - lease.spent_trials)
    seconds = None if limits.seconds is None else max(0.0, limits.seconds - lease.spent_seconds)
    return replace(limits, max_trials=trials, seconds=seconds)


class DrivenSearch(Heartbeat):
    """What this process does under a lease, as a context manager: the lease is kept meanwhile, and how the search ends
    is stored, whatever ends it."""

    def __init__(self, store: Store, lease: Lease) -> None:
        super().__init__(store.queue, lease)
        self.result: dict[str, Any] = {}
        """What the search has found, to be stored with its end."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, Exception):
            self.result["reason"] = str(error) if isinstance(error, AutofitError) else in_one_line(error)
        if isinstance(error, Shortfall):
            self.result |= error.facts()
        # Every trial is kept by now. Failing to record the ending must not cost the answer or mask the real error.
        with suppress(StoreError, LeaseLost):
            if isinstance(error, KeyboardInterrupt):
                self._queue.interrupt(self.lease, self.result)
            else:
                self._queue.end(self.lease, _ending(error), self.result)


def _ending(error: BaseException | None) -> str:
    if error is None:
        return "succeeded"
    return "nothing_fits" if isinstance(error, NothingFits) else "failed"


def results(search_run: SearchLoop) -> dict[str, Any]:
    """What is stored of a search that has run, to be repeated by `repeat_findings`."""
    return {
        "stopped_because": search_run.progress.stopped_because,
        "ruled_out": search_run.progress.ruled_out,
        "regret_bound": search_run.progress.regret_bound,
        # What was found without any trial could not be repeated from the store.
        "answers": bool(search_run.state.trials or not search_run.beyond_host),
    }


def _already_answered(alike: Sequence[StoredSearch], request: SearchRequest) -> str | None:
    """The id of a finished search for the same question that had at least this budget; None if there is none."""
    for earlier in filter(_is_answer, alike):
        budget = earlier.request
        if _at_least(budget["max_trials"], request.max_trials) and _at_least(
            budget["seconds"], request.time_budget_seconds
        ):
            return earlier.search_id
    return None


def _resumable_fresh(alike: Sequence[StoredSearch]) -> str | None:
    """The id of a `fresh` search for the same question that was interrupted or has failed, to be resumed with its own
    trials. None if there is none, or if a later search has answered the question."""
    for earlier in alike:
        if _is_answer(earlier):
            return None
        if earlier.request.get("fresh") and earlier.state in ("cancelled", "failed"):
            return earlier.search_id
    return None


def _is_answer(earlier: StoredSearch) -> bool:
    answers = (earlier.result or {}).get("answers", True)
    return earlier.state in ("succeeded", "nothing_fits") and bool(answers)


def _at_least(spent: float | None, limit: float | None) -> bool:
    return spent is None or (limit is not None and spent >= limit)


def repeat_findings(search_run: SearchLoop, store: Store, search_id: str) -> None:
    """Restore what the search concluded beyond its trials, as far as that was stored: an answer from the store
    predicts nothing."""
    earlier = store.search(search_id)
    result = (earlier.result or {}) if earlier is not None else {}
    if result.get("ruled_out") is not None:
        search_run.progress.ruled_out = result["ruled_out"]
    search_run.progress.regret_bound = result.get("regret_bound")
    if result.get("stopped_because"):
        said = search_run.progress.stopped_because
        why = result["stopped_because"].removeprefix(said).removeprefix(": ")
        search_run.progress.stopped_because = f"{said}: {why}" if why else said
