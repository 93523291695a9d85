"""Searches in the store: one that has already answered the question, one to resume, and how each ended."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from autofit.core.errors import NothingFits, StoreError
from autofit.planning.plan import Plan
from autofit.planning.requests import SearchRequest
from autofit.store import Store

if TYPE_CHECKING:
    # Imported where it is used: Optuna takes a quarter of a second, which an answer from the store need not wait for.
    from autofit.search.loop import Search


def begin(request: SearchRequest, plan: Plan, store: Store) -> tuple[str, bool]:
    """The search's id, and whether an earlier search has already answered it; if not, it is now stored as running."""
    job = plan.job
    question = request.question(job, plan.limits.memory_bytes, plan.lattice_digest)
    answered = None if request.fresh else _already_answered(store, question, request)
    if answered is not None:
        return answered, True
    begun = _begun_afresh(store, question) if request.fresh else None
    search_id = begun or uuid.uuid4().hex
    store.begin_search(
        search_id,
        hardware=job.hardware,
        stack=job.stack,
        workload=job.workload,
        request={
            "question": question,
            "fresh": request.fresh,
            "max_trials": request.max_trials,
            "seconds": request.time_budget_seconds,
        },
    )
    return search_id, False


@contextmanager
def its_end_noted(store: Store, search_id: str, found: Search) -> Iterator[None]:
    """Record in the store how the search run inside this context ended."""
    status = "failed"
    try:
        yield
        status = "done"
    except NothingFits:
        if found.state.trials or not found.beyond_host:
            status = "done"  # that is an answer, too; one without any trial could not be repeated from the store
        raise
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        # Every trial is kept by now. Failing to record the ending must not cost the answer or mask the real error.
        with suppress(StoreError):
            ended = {
                "stopped_because": found.progress.stopped_because,
                "ruled_out": found.progress.ruled_out,
                "regret_bound": found.progress.regret_bound,
            }
            store.end_search(search_id, status, ended)


def _already_answered(store: Store, question: dict[str, Any], request: SearchRequest) -> str | None:
    """The id of a finished search that asked the same question with at least this budget; None if there is none."""
    for earlier in store.searches():
        asked = earlier.request
        if earlier.status != "done" or asked.get("question") != question:
            continue
        if _at_least(asked["max_trials"], request.max_trials) and _at_least(
            asked["seconds"], request.time_budget_seconds
        ):
            return earlier.search_id
    return None


def _begun_afresh(store: Store, question: dict[str, Any]) -> str | None:
    """The id of a `fresh` search for the same question that was interrupted or killed, to be resumed with its own
    trials. None if there is none, or if a later search has answered the question."""
    for earlier in store.searches():
        if earlier.request.get("question") != question:
            continue
        if earlier.status == "done":
            return None
        if earlier.request.get("fresh"):
            return earlier.search_id
    return None


def _at_least(spent: float | None, asked: float | None) -> bool:
    return spent is None or (asked is not None and spent >= asked)


def repeat_findings(found: Search, store: Store, search_id: str) -> None:
    """What the search concluded beyond its trials, as far as that was stored: an answer from the store predicts
    nothing."""
    earlier = store.search(search_id)
    said = (earlier.result or {}) if earlier is not None else {}
    if said.get("ruled_out") is not None:
        found.progress.ruled_out = int(said["ruled_out"])
    if said.get("regret_bound") is not None:
        found.progress.regret_bound = float(said["regret_bound"])
