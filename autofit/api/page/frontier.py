"""The start page, and the frontier of one workload on one hardware."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from autofit.api.models import Models
from autofit.api.page.forms import choices, chosen, workload_query
from autofit.api.page.rendering import PageRoute, is_partial, render
from autofit.api.problems import status_of
from autofit.api.routes.common import OpenedStore
from autofit.api.routes.query import Question
from autofit.core.device.hardware import Hardware
from autofit.core.errors import AutofitError, NothingFits
from autofit.core.frontier import by_method
from autofit.core.units import GIB
from autofit.core.workload import Workload
from autofit.operations.recommendation import frontier_and_recommendation
from autofit.planning.requests import memory_limit
from autofit.store import Store

ROUTES = APIRouter(route_class=PageRoute)
MOST_LISTED = 40
"""Measured workloads that the start page lists."""


@ROUTES.get("/")
def start(request: Request, store: OpenedStore, models: Models) -> Response:
    contexts = _measured(store)
    latest = contexts[0][2] if contexts else {}
    form = chosen([*latest.items(), *request.query_params.items()])
    return render(request, "start.html", contexts=contexts, chosen=form, **choices(store, models))


def _measured(store: Store) -> list[tuple[Workload, Hardware, dict[str, Any]]]:
    """What can be asked about at once, with the query that asks; users' programs are not asked about here."""
    every = ((w, h) for h in store.hardware() for w in store.workloads(hardware_key=h.key))
    found = [(w, h) for w, h in every if w.program is None]
    return [(w, h, workload_query(w, hardware=h.name)) for w, h in found[:MOST_LISTED]]


@ROUTES.get("/frontier")
def frontier(request: Request, query: Annotated[Question, Query()], store: OpenedStore, models: Models) -> Response:
    asked = query.resolve(store, models)
    status, answer = 200, {}
    try:
        answer = _answer(asked, store)
    except AutofitError as error:
        status, answer = status_of(error)[0], {"said": str(error), "frontier": None}
    # By its name: a model of the server's own is asked about by its path here.
    here = workload_query(asked["asked"], model=request.query_params["model"], hardware=asked["hardware"])
    if is_partial(request):
        return render(request, "_answer.html", status=status, here=here, **answer)
    form = {**dict(request.query_params), "hardware": asked["hardware"]}
    told = {"here": here, "chosen": chosen(form.items()), "form": form}
    return render(request, "frontier.html", status=status, **told, **choices(store, models), **answer)


def _answer(asked: dict[str, Any], store: Store) -> dict[str, Any]:
    """The frontier, and the recommendation or why there is none."""
    found, recommend = frontier_and_recommendation(**asked, store=store)
    recommended, said = None, None
    try:
        recommended = recommend()
    except NothingFits as error:
        said = str(error)
    limit = memory_limit(asked["memory_limit_bytes"], found.hardware, found.workload.devices)
    return {
        "frontier": found,
        "tables": by_method(found.points),
        "recommendation": recommended,
        "said": said,
        "limit": limit,
        "limit_gib": round(limit / GIB, 2),
        "most_gib": most_gib(found.hardware, found.workload.devices),
    }


def most_gib(hardware: Hardware, devices: int) -> float:
    """The highest limit that makes sense: ranks on a processor share its memory."""
    shared_by = devices if hardware.kind == "cpu" else 1
    return int(hardware.memory_bytes / shared_by / GIB * 100) / 100
