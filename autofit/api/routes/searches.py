"""Routes that start, watch and cancel searches, and the one that tells who did."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable
from dataclasses import fields
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, HTTPException, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, Field

from autofit.api.middleware.access import ADMIN, RUN, MayRun
from autofit.api.routes.common import Models, NamedModels, OpenedStore, Strict
from autofit.api.routes.query import GoalQuery, MemoryLimit, WorkloadBody, understood
from autofit.api.schema.documents import EventAnswer, State
from autofit.catalog import space
from autofit.core.errors import StoreError, unknown
from autofit.core.units import LARGEST_INTEGER, as_bytes, parse_duration
from autofit.operations import SearchRequest
from autofit.operations.service.submission import submit
from autofit.store import ENDINGS, Audited, Search

_log = logging.getLogger(__name__)


class AskedSearch(GoalQuery, WorkloadBody):
    """The options of `autofit search`, by the same names and with the same defaults."""

    space: str | None = Field(default=None, description="Name of a built-in search space")
    hardware: str = Field(default="auto", description="Name of hardware; auto: the only one that is known")
    memory_limit: MemoryLimit = Field(default=None, description="Such as 24GiB")
    max_trials: int | None = Field(default=None, ge=1)
    time_budget: Annotated[str, understood(parse_duration)] = Field(default="10m", description="Such as 10m")
    fresh: bool = Field(default=False, description="Measure again what the store knows")
    thorough: bool = Field(default=False, description="Go on to the whole frontier")
    predict: bool = Field(default=True, description="Estimate every config before the first trial")


class SearchState(BaseModel):
    """Where a search stands."""

    search_id: str
    state: State
    asked: dict[str, Any]
    waiting_for: str | None = Field(description="What has to come before it goes on; null while it does")
    result: dict[str, Any] | None = Field(description="What it answered, or the reason why not; null before it ends")
    started_at: str
    ended_at: str | None
    drivers: int = Field(description="How many processes have driven it so far")
    spent_seconds: float
    spent_trials: int

    @classmethod
    def of(cls, search: Search, models: NamedModels) -> SearchState:
        waiting_for = f"a free runner with {search.hardware_name}" if search.state == "queued" else None
        if search.state == "running" and not search.held:
            waiting_for = "another driver: its own has gone"
        fields = {name: value for name, value in search.to_json().items() if name in cls.model_fields}
        request = dict(search.request.get("asked", search.request))
        request["model"] = search.workload.model  # its name, never its path on the server
        result = None if search.result is None else models.told(search.result)
        return cls(**{**fields, "result": result}, asked=request, waiting_for=waiting_for, drivers=search.lease_epoch)


def stored_search(search_id: Annotated[str, Path(pattern="^[0-9A-Za-z-]{1,64}$")], store: OpenedStore) -> Search:
    search = store.search(search_id)
    if search is None:
        raise HTTPException(404, f"there is no search {search_id!r}")
    return search


StoredSearch = Annotated[Search, Depends(stored_search)]
ROUTES = APIRouter(route_class=Strict)


@ROUTES.post("/v1/searches", status_code=202, dependencies=[RUN], summary="Start a search, or join the same one")
def start(
    body: AskedSearch,
    store: OpenedStore,
    request: Request,
    response: Response,
    token: MayRun,
    models: Models,
    idempotency_key: Annotated[
        str | None, Header(max_length=200, description="The same key never starts a second search")
    ] = None,
) -> SearchState:
    workload = body.workload(models)
    if body.space is not None and body.space not in space.names():
        raise unknown("space", body.space, space.names())
    asked = SearchRequest(
        workload=workload,
        goal=body.goal(),
        memory_limit_bytes=as_bytes(body.memory_limit),
        time_budget_seconds=parse_duration(body.time_budget),
        **body.model_dump(include={option.name for option in fields(SearchRequest)}),
    )
    search_id = submit(asked, store, key=idempotency_key, by=token.name)
    request.state.search_id = search_id
    response.headers["Location"] = f"/v1/searches/{search_id}"
    return SearchState.of(stored_search(search_id, store), models)


@ROUTES.get("/v1/searches/{search_id}", summary="Where a search stands, and what it answered")
def state(search: StoredSearch, models: Models) -> SearchState:
    return SearchState.of(search, models)


@ROUTES.delete("/v1/searches/{search_id}", dependencies=[RUN], summary="Cancel a search; its trials stay stored")
def cancel(search: StoredSearch, store: OpenedStore, token: MayRun, models: Models) -> SearchState:
    """It goes on for others that have asked for it; a token with the scope admin ends it for all."""
    is_admin = token.allows("admin")
    if not is_admin and not store.access.has_asked(token.name, search.search_id):
        store.access.note_refusal(token.name, search.search_id)
        raise HTTPException(403, f"search {search.search_id} is not one that {token.name!r} asked for")
    store.queue.cancel(search.search_id, by=token.name, for_all=is_admin)
    return SearchState.of(stored_search(search.search_id, store), models)


@ROUTES.get(
    "/v1/searches/{search_id}/events",
    response_class=EventSourceResponse,
    summary="What happens in a search, as server-sent events, from its beginning to its end",
)
async def events(
    search: StoredSearch,
    store: OpenedStore,
    models: Models,
    last_event_id: Annotated[int, Header(ge=0, lt=2**31, description="Only events after this one")] = 0,
) -> AsyncIterable[EventAnswer]:
    search_id, seen = search.search_id, last_event_id
    while True:
        try:
            # The state first: the event of an ending is written with it.
            now = await run_in_threadpool(store.search, search_id)
            happened = await run_in_threadpool(store.queue.events, search_id, after=seen)
        except StoreError as error:  # too late for a status: whoever follows asks again for what comes after `seen`
            _log.warning("autofit: the events of search %s break off: %s", search_id, error)
            return
        for event in happened:
            seen = event.seq
            told = {**event.to_json(), "body": models.told(event.body)}
            # FastAPI describes what it is annotated with, and sends this as it is.
            yield ServerSentEvent(id=str(seen), event=event.kind, data=told)  # type: ignore[misc]
        if now is None or now.state in ENDINGS:
            return
        await asyncio.sleep(0.5)


@ROUTES.get("/v1/audit", dependencies=[ADMIN], summary="Who has started and cancelled what, newest first")
def audit(
    store: OpenedStore,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[
        int | None, Query(ge=1, le=LARGEST_INTEGER, description="The last `number` of the page before")
    ] = None,
) -> list[Audited]:
    """Needs a token with the scope admin."""
    return store.access.audit(limit=limit, before=before)
