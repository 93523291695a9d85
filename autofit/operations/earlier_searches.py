"""What the store has of searches: one that has answered the question already, one to go on with, how each has ended."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autofit.errors import NothingFits, StoreError
from autofit.operations.preparing import Prepared
from autofit.operations.requests import SearchRequest
from autofit.store import Store

if TYPE_CHECKING:
    # Imported where it is used: Optuna takes a quarter of a second that an answer from the store need not wait for.
    from autofit.search.loop import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a search says of its configs beside its trials."""

    ruled_out: int
    regret_bound: float | None


def begin(request: SearchRequest, prepared: Prepared, store: Store) -> tuple[str, bool]:
    """The search's id, and whether an earlier one has answered it; if not, it is in the store from here on."""
    job = prepared.job
    question = request.question(job, prepared.memory_limit_bytes, prepared.narrowed.digest)
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
    """Note in the store how the search inside has ended."""
    status = "failed"
    try:
        yield
        status = "done"
    except NothingFits:
        if found.knowledge.trials or not found.beyond_host:
            status = "done"  # an answer, too; without a trial nothing in the store could give it again
        raise
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        # Every trial is kept by now. A note on how the search ended is not worth the answer or the true failure.
        with suppress(StoreError):
            ended = {
                "stopped_because": found.progress.stopped_because,
                "ruled_out": found.progress.ruled_out,
                "regret_bound": found.progress.regret_bound,
            }
            store.end_search(search_id, status, ended)


def _already_answered(store: Store, question: dict[str, Any], request: SearchRequest) -> str | None:
    """The id of a search that ended and has asked the same with at least this budget; None if there is none."""
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
    """The id of a search that has asked the same afresh and was interrupted or killed: it goes on with the trials that
    are its own. None if there is none, or if a later search has answered the question."""
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


def findings(found: Search, store: Store, search_id: str) -> Findings:
    """Of a search that has run, its own; of an answer from the store, which predicts nothing, those of the search that
    gave it, as far as that has said them."""
    earlier = store.search(search_id) if found.answer_only else None
    said = (earlier.result or {}) if earlier is not None else {}
    ruled_out, bound = said.get("ruled_out"), said.get("regret_bound")
    return Findings(
        ruled_out=found.progress.ruled_out if ruled_out is None else int(ruled_out),
        regret_bound=found.progress.regret_bound if bound is None else float(bound),
    )
