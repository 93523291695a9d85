"""Searches in the store: one that has already answered the question, one to resume, and how each ends."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
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
    from autofit.operations.searching.result import SearchResult
    from autofit.search.loop import SearchLoop


def begin(request: SearchRequest, plan: Plan, store: Store, claimed: Lease | None = None) -> Lease:
    """Store the search as running, with its plan, and return the right to drive it: `claimed` if a runner has it.

    An interrupted search of the same request is resumed. Raises `UnderWay` if another process drives it.
    """
    job = plan.job
    resumed = _resumable_fresh(_alike(request, plan, store)) if request.fresh and claimed is None else None
    return store.queue.begin(
        resumed or uuid.uuid4().hex if claimed is None else claimed.search_id,
        new_owner() if claimed is None else claimed.owner,
        digest=digest_of(request, job.workload, job.hardware.name),
        hardware=job.hardware,
        stack=job.stack,
        workload=job.workload,
        request={
            "question": _question(request, plan),
            "fresh": request.fresh,
            "max_trials": request.max_trials,
            "seconds": request.time_budget_seconds,
        },
        campaign_id=request.campaign_id,
    )


def answered_by(request: SearchRequest, plan: Plan, store: Store) -> str | None:
    """The id of a finished search for the same question that had at least this budget; None if `fresh`."""
    if request.fresh:
        return None
    for earlier in filter(_is_answer, _alike(request, plan, store)):
        trials, seconds = earlier.request["max_trials"], earlier.request["seconds"]
        if _at_least(trials, request.max_trials) and _at_least(seconds, request.time_budget_seconds):
            return earlier.search_id
    return None


def answered_plan(request: SearchRequest, opened: Store | None = None) -> Plan | None:
    """The plan of a cluster's search that the store answers, for a named card and the versions installed here, so that
    it need not wait for a device; None if the cluster must be asked. Opens the store if it is not."""
    wanted = None if request.ray_address is None or request.fresh else requested_card(request.hardware, request.device)
    if wanted is None:
        return None
    _, workload = request.workload.resolve()
    with suppress(NoStore), nullcontext(opened) if opened else Store.open(request.store, create=False) as store:
        answers = filter(_is_answer, store.searches(stack_key=installed_stack().key, workload_key=workload.key))
        sites = [(s.hardware, s.stack) for s in answers if s.hardware is not None and s.stack is not None]
        for hardware, stack in dict.fromkeys(site for site in sites if site[0].name == wanted.name):
            job = request.workload.job((hardware, stack))
            with suppress(UsageError, NothingFits):  # today's nodes may have more
                limit = memory_limit(request.memory_limit_bytes, job.hardware, workload.devices)
                plan = resolve_for(request, job, limit)
                if answered_by(request, plan, store) is not None:
                    return plan
    return None


def remaining_limits(lease: Lease, limits: Limits) -> Limits:
    """What earlier drivers of the search have left of its limits."""
    trials = None if limits.max_trials is None else max(0, limits.max_trials - lease.spent_trials)
    seconds = None if limits.seconds is None else max(0.0, limits.seconds - lease.spent_seconds)
    return replace(limits, max_trials=trials, seconds=seconds)


class Driver(Heartbeat):
    """This process as the driver of a search: a context manager that keeps its lease, and stores how it ends."""

    def __init__(self, store: Store, lease: Lease) -> None:
        super().__init__(store.queue, lease)
        self.store = store
        self.loop: SearchLoop | None = None
        """Set once it is about to run."""
        self.result: SearchResult | None = None

    def _keep_ending(self, error: BaseException | None) -> None:
        findings = self._findings(error)
        # Every trial is kept by now. Failing to record the ending must not cost the answer or mask the real error.
        with suppress(StoreError, LeaseLost):
            if isinstance(error, KeyboardInterrupt):
                self._queue.interrupt(self.lease, findings)
            else:
                ending = "nothing_fits" if isinstance(error, NothingFits) else "failed"
                self._queue.end(self.lease, "succeeded" if error is None else ending, findings)

    def _findings(self, error: BaseException | None) -> dict[str, Any]:
        """What is stored of the search with its end."""
        findings: dict[str, Any] = {}
        progress = getattr(self.loop, "progress", None)  # missing if interrupted as it was about to run
        if self.loop is not None and progress is not None:
            findings = {
                "stopped_because": progress.stopped_because,
                "ruled_out": progress.ruled_out,
                "regret_bound": progress.regret_bound,
                # What was found without any trial could not be repeated from the store.
                "answers": bool(self.loop.state.trials or not self.loop.beyond_host),
            }
        if self.result is not None:
            findings["recommendation"] = self.result.recommendation.to_json()
        if isinstance(error, Exception):
            findings["reason"] = str(error) if isinstance(error, AutofitError) else in_one_line(error)
        if isinstance(error, Shortfall):
            findings |= error.facts()
        return findings


def repeat_findings(loop: SearchLoop, store: Store, search_id: str) -> None:
    """Restore what an earlier driver's loop concluded beyond its trials: an answer from the store predicts nothing."""
    earlier = store.search(search_id)
    findings = (earlier.result or {}) if earlier is not None else {}
    if findings.get("ruled_out") is not None:
        loop.progress.ruled_out = findings["ruled_out"]
    loop.progress.regret_bound = findings.get("regret_bound")
    if findings.get("stopped_because"):
        said = loop.progress.stopped_because
        why = findings["stopped_because"].removeprefix(said).removeprefix(": ")
        loop.progress.stopped_because = f"{said}: {why}" if why else said


def _question(request: SearchRequest, plan: Plan) -> dict[str, Any]:
    return request.question(plan.job, plan.limits.memory_bytes, plan.lattice_digest)


def _alike(request: SearchRequest, plan: Plan, store: Store) -> list[StoredSearch]:
    """The stored searches for the same question, the newest first."""
    question = _question(request, plan)
    stored = store.searches(stack_key=plan.job.stack.key, workload_key=plan.job.workload.key)
    return [earlier for earlier in stored if earlier.request.get("question") == question]


def _resumable_fresh(alike: Sequence[StoredSearch]) -> str | None:
    """The id of an interrupted or failed `fresh` search for this question, unless a later one has answered it."""
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
