"""Searches: the list, the form that starts one, and one search while it runs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from autofit.api.middleware.access import RUN, MayRun
from autofit.api.page.forms import Fields, choices, chosen, workload_query
from autofit.api.page.rendering import PageRoute, is_partial, render, sentence
from autofit.api.routes import searches
from autofit.api.routes.common import Models, OpenedStore
from autofit.api.routes.searches import AskedSearch, SearchState, StoredSearch
from autofit.catalog import space
from autofit.catalog.hardware import cards
from autofit.core.outcome import seconds_since
from autofit.core.units import format_duration
from autofit.store import ENDINGS, Search

ROUTES = APIRouter(route_class=PageRoute)


@ROUTES.get("/searches")
def listed(request: Request, store: OpenedStore, models: Models) -> Response:
    rows = [(search, format_duration(seconds_since(search.started_at))) for search in store.searches(limit=50)]
    searchable = [card.name for card in cards() if "search" in card.supports]
    offered = {
        **choices(store, models),
        "hardware": list(dict.fromkeys([*store.queue.hardware_names(), *searchable])),
        "spaces": space.names(),
    }
    form = {"time_budget": "10m", "max_trials": "", "space": "", **chosen(request.query_params.items())}
    return render(request, "searches.html", rows=rows, chosen=form, **offered)


@ROUTES.post("/searches", dependencies=[RUN])
def start(request: Request, given: Fields, store: OpenedStore, models: Models, token: MayRun) -> Response:
    filled: dict[str, Any] = dict(given)
    if lengths := given.get("lengths"):
        filled["lengths"] = {"tokens": lengths.split(","), "longest": given.get("seq_len")}
    body = AskedSearch.model_validate(filled, strict=False)  # a form holds text
    state = searches.start(body, store, request, Response(), token, models)
    return _go_to(request, f"/searches/{state.search_id}")


@ROUTES.get("/searches/{search_id}")
def search_page(request: Request, search: StoredSearch, models: Models) -> Response:
    template = "_search_state.html" if is_partial(request) else "search.html"
    return render(request, template, **_values(search, SearchState.of(search, models)))


@ROUTES.post("/searches/{search_id}/cancel", dependencies=[RUN])
def cancel(request: Request, search: StoredSearch, store: OpenedStore, token: MayRun, models: Models) -> Response:
    if searches.cancel(search, store, token, models).state not in ENDINGS:
        return sentence(request, "The search goes on: others want it too.", 200)
    return _go_to(request, f"/searches/{search.search_id}")


def _go_to(request: Request, address: str) -> Response:
    if is_partial(request):
        return Response(headers={"HX-Redirect": address})
    return RedirectResponse(address, 303)


def _values(search: Search, state: SearchState) -> dict[str, Any]:
    result = state.result or {}
    return {
        "search": search,
        "state": state,
        "over": search.state in ENDINGS,
        "endings": ENDINGS,
        "recommended": result.get("recommendation"),
        "reason": result.get("reason"),
        "fields": workload_query(search.workload, hardware=getattr(search.hardware, "name", search.hardware_name)),
    }
