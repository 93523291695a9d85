"""The start page, and the frontier of one workload on one hardware with its chart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from autofit import operations
from autofit.api.page.forms import choices, chosen, workload_query
from autofit.api.page.rendering import HEADERS, PageRoute, is_partial, render
from autofit.api.problems import detail_of, status_of
from autofit.api.routes.common import Models, OpenedStore
from autofit.api.routes.query import Question, ResolvedQuestion
from autofit.core.device.hardware import Hardware
from autofit.core.errors import AutofitError, NothingFits
from autofit.core.frontier import by_method
from autofit.core.outcome import Fits, OutOfMemory, Trial, context_keys
from autofit.core.units import GIB
from autofit.core.workload import Workload
from autofit.export.charts.frontier_chart import axis_titles, title
from autofit.operations.recommendation import StoredAnswer
from autofit.planning.lattices import within
from autofit.planning.requests import memory_limit
from autofit.store import Store
from autofit.techniques.short_text import short

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
        status, answer = status_of(error)[0], {"message": detail_of(request, error), "frontier": None}
    # By its name: the question has the path of a model in the server's folder.
    fields = workload_query(question.workload, model=request.query_params["model"], hardware=question.hardware)
    if is_partial(request):
        return render(request, "_answer.html", status=status, fields=fields, **answer)
    form = {**dict(request.query_params), "hardware": question.hardware}
    values = {"fields": fields, "chosen": chosen(form.items()), "form": form}
    return render(request, "frontier.html", status=status, **values, **choices(store, models), **answer)


def _answer(question: ResolvedQuestion, store: Store) -> dict[str, Any]:
    """The frontier, and the recommendation or why there is none."""
    answer = StoredAnswer(question.workload, **question.conditions, store=store)
    frontier, recommended, message = answer.frontier, None, None
    try:
        recommended = answer.recommendation()
    except NothingFits as error:
        message = str(error)
    hardware, devices = frontier.hardware, frontier.workload.devices
    limit = memory_limit(question.memory_limit_bytes, hardware, devices)
    most = hardware.memory_bytes / (devices if hardware.kind == "cpu" else 1)  # ranks on a processor share its memory
    return {
        "frontier": frontier,
        "tables": by_method(frontier.points),
        "recommendation": recommended,
        "message": message,
        "limit": limit,
        "limit_gib": round(limit / GIB, 2),
        "most_gib": int(most / GIB * 100) / 100,
    }


@ROUTES.get("/frontier/points")
def points(query: Annotated[Question, Query()], store: OpenedStore, models: Models) -> Response:
    """What the chart draws: every measured config by method, and where trials ran out of memory."""
    question = query.resolve(store, models)
    frontier = operations.frontier(question.workload, **question.conditions, store=store)
    trials = store.trials(**context_keys(frontier.hardware, frontier.stack, frontier.workload))
    allowed = within(question.goal, (t.config for t in trials))
    on_frontier = {p.trial_id for p in frontier.points}
    traces = {
        method: {
            "frontier": _columns(t for t in of_method if t.trial_id in on_frontier),
            "others": _columns(t for t in of_method if t.trial_id not in on_frontier),
        }
        for method, of_method in by_method(t for t in trials if allowed(t.config)).items()
    }
    memory, speed = axis_titles(frontier)
    chart = {"title": title(frontier), "memory": memory, "speed": speed, "methods": traces}
    return JSONResponse(chart, headers=HEADERS)


def _columns(trials: Iterable[Trial]) -> dict[str, Any]:
    """Trials as the columns that Plotly takes, lightest first."""
    rows = sorted(row for trial in trials if (row := _row(trial)) is not None)
    names = ("gib", "speed", "out", "id", "text")
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def _row(trial: Trial) -> tuple[float, float, bool, int, str] | None:
    """Memory in GiB, tokens per second, whether it ran out of memory, number and config; None for what says nothing of
    memory. What ran out of memory stands where it was predicted to, else at its limit and without a speed."""
    outcome, text, number = trial.outcome, short(trial.config), trial.trial_id or 0
    if isinstance(outcome, Fits):
        m = outcome.measurement
        return round(m.device_bytes / GIB, 3), round(m.tokens_per_second, 1), False, number, text
    if not isinstance(outcome, OutOfMemory):
        return None
    predicted = trial.prediction
    if predicted is None:
        return round(trial.memory_limit_bytes / GIB, 3), 0.0, True, number, text
    seconds = predicted.step_seconds
    speed = round(trial.workload.tokens_per_step / seconds, 1) if seconds else 0.0
    return round(predicted.device_bytes / GIB, 3), speed, True, number, text
