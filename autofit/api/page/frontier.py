"""The start page, and the frontier of one workload on one hardware."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from autofit.api.models import Models
from autofit.api.page.forms import choices, chosen, workload_query
from autofit.api.page.rendering import PageRoute, is_partial, render
from autofit.api.problems import status_of
from autofit.api.routes.common import OpenedStore
from autofit.api.routes.query import Question, ResolvedQuestion
from autofit.core.device.hardware import Hardware
from autofit.core.errors import AutofitError, NothingFits
from autofit.core.frontier import by_method
from autofit.core.units import GIB
from autofit.core.workload import Workload
from autofit.operations.recommendation import StoredAnswer
from autofit.planning.requests import memory_limit
from autofit.store import Store

ROUTES = APIRouter(route_class=PageRoute)


@ROUTES.get("/")
def start(request: Request, store: OpenedStore, models: Models) -> Response:
    contexts = _measured(store)
    latest = contexts[0][2] if contexts else {}
    form = chosen([*latest.items(), *request.query_params.items()])
    return render(request, "start.html", contexts=contexts, chosen=form, **choices(store, models))


def _measured(store: Store) -> list[tuple[Workload, Hardware, dict[str, Any]]]:
    """The measured workloads on their hardware, each with the query for its frontier; none of users' programs."""
    pairs = ((w, h) for h in store.hardware() for w in store.workloads(hardware_key=h.key))
    contexts = [(w, h) for w, h in pairs if w.program is None]
    return [(w, h, workload_query(w, hardware=h.name)) for w, h in contexts[:40]]


@ROUTES.get("/frontier")
def frontier(request: Request, query: Annotated[Question, Query()], store: OpenedStore, models: Models) -> Response:
    question = query.resolve(store, models)
    status, answer = 200, {}
    try:
        answer = _answer(question, store)
    except AutofitError as error:
        status, answer = status_of(error)[0], {"message": str(error), "frontier": None}
    # By its name: the question has the path of a model in the server's folder.
    fields = workload_query(question.workload, model=request.query_params["model"], hardware=question.hardware)
    if is_partial(request):
        return render(request, "_answer.html", status=status, fields=fields, **answer)
    form = {**dict(request.query_params), "hardware": question.hardware}
    values = {"fields": fields, "chosen": chosen(form.items()), "form": form}
    return render(request, "frontier.html", status=status, **values, **choices(store, models), **answer)


def _answer(question: ResolvedQuestion, store: Store) -> dict[str, Any]:
    """The frontier, and the recommendation or why there is none."""
    answer = StoredAnswer.of(question.workload, **question.conditions, store=store)
    frontier, recommended, message = answer.frontier, None, None
    try:
        recommended = answer.recommendation()
    except NothingFits as error:
        message = str(error)
    limit = memory_limit(question.memory_limit_bytes, frontier.hardware, frontier.workload.devices)
    return {
        "frontier": frontier,
        "tables": by_method(frontier.points),
        "recommendation": recommended,
        "message": message,
        "limit": limit,
        "limit_gib": round(limit / GIB, 2),
        "most_gib": most_gib(frontier.hardware, frontier.workload.devices),
    }


def most_gib(hardware: Hardware, devices: int) -> float:
    """The highest limit that makes sense: ranks on a processor share its memory."""
    shared_by = devices if hardware.kind == "cpu" else 1
    return int(hardware.memory_bytes / shared_by / GIB * 100) / 100
