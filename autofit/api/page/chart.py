"""What the chart draws: every measured config of one frontier, by method, and where trials ran out of memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse

from autofit import operations
from autofit.api.page.rendering import HEADERS, PageRoute
from autofit.api.routes.common import Models, OpenedStore
from autofit.api.routes.query import Question
from autofit.core.frontier import by_method
from autofit.core.outcome import Fits, OutOfMemory, Trial, context_keys
from autofit.core.units import GIB
from autofit.export.charts.frontier_chart import axis_titles, title
from autofit.planning.lattices import within
from autofit.techniques.short_text import short

ROUTES = APIRouter(route_class=PageRoute)


@ROUTES.get("/frontier/points")
def points(query: Annotated[Question, Query()], store: OpenedStore, models: Models) -> Response:
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
