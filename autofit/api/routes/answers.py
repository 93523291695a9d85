"""Routes that answer from the store: recommendation, frontier, trials."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import Field

from autofit import export, operations
from autofit.api.look import look
from autofit.api.routes.common import NamedModels, Strict
from autofit.api.routes.query import Question, ResolvedQuestion, TrialsQuery
from autofit.api.routes.remembered import Content, Tagged, of_question
from autofit.api.schema.documents import FrontierAnswer, RecommendationAnswer, TrialsAnswer, answers
from autofit.catalog.hardware import matching_cards
from autofit.core.errors import NotMeasured, UsageError
from autofit.operations.recommendation import recommend, search_command
from autofit.operations.service.submission import check_limit
from autofit.prediction.predicted_frontier import predicted_recommendation
from autofit.store import Store

ROUTES = APIRouter(route_class=Strict)
NOTES_HEADER = "Autofit-Notes"
"""Holds a JSON array of what an export cannot express."""


class Recommended(Question):
    """The parameters of a recommendation."""

    format: str = Field(default="json", description=f"One of {', '.join(export.FORMATS)}")
    anyway: bool = Field(
        default=False, description="Export even what needs more memory in that trainer than was measured"
    )
    provenance: Literal["any", "measured", "predicted"] = Field(
        default="any", description="any: predicted only where nothing was measured, which takes up to a few minutes"
    )


@ROUTES.get(
    "/v1/recommendation",
    summary="The fastest config that fits: measured, or else predicted",
    responses=answers(RecommendationAnswer, "text/plain"),
)
async def recommendation(query: Annotated[Recommended, Query()], request: Request) -> Response:
    format, provenance, store = query.format, query.provenance, request.app.state.store
    export.check_format(format)
    question = await look(store, lambda: query.resolve(store, request.app.state.models))
    if provenance == "predicted":
        if format != "json":
            raise UsageError("an export states what was measured: leave provenance=predicted out")
        return await run_in_threadpool(_predicted, question, store, request)
    try:
        tagged = await look(store, lambda: of_question(request, question.workload, question.hardware, store))
        return await tagged.answer(partial(_measured, question, store, query, request.app.state.models))
    except NotMeasured:
        if provenance == "measured" or format != "json" or _predictable(question) is None:
            raise
        return await run_in_threadpool(_predicted, question, store, request)


def _measured(question: ResolvedQuestion, store: Store, query: Recommended, models: NamedModels) -> Content:
    answer = recommend(question.workload, **question.conditions, store=store)
    if query.format == "json":
        return Content.json(answer.to_json())
    exported = export.export(answer, format=query.format, source=operations.hub_id(question.workload.model))
    if not query.anyway:
        export.check_memory(exported, query.format, trainer=query.trainer)
    notes = {NOTES_HEADER: json.dumps(list(exported.notes))} if exported.notes else {}
    return Content(models.by_name(exported.text), "text/plain; charset=utf-8", notes)


def _predictable(question: ResolvedQuestion) -> operations.WorkloadOptions | None:
    """The workload, where its model's architecture is at hand, and the hardware is a card of the catalog."""
    workload = question.workload
    return workload if isinstance(workload, operations.WorkloadOptions) and matching_cards(question.hardware) else None


def _predicted(question: ResolvedQuestion, store: Store, request: Request) -> Response:
    workload, hardware = _predictable(question), question.hardware
    if workload is None:
        model = question.workload.model
        raise UsageError(f"{model} on {hardware} cannot be predicted: name a model and a card of the catalog")
    check_limit(question.memory_limit_bytes, hardware)  # before it waits for other predictions
    search = operations.SearchRequest(workload=workload, store=store.url, **question.conditions)
    document = request.app.state.predicting.call(predicted_recommendation, search)
    if document is None:
        raise NotMeasured(f"no speed can be predicted on {hardware}", remedy=f"run: {search_command(workload)}")
    return JSONResponse(document)


@ROUTES.get(
    "/v1/frontier",
    summary="The measured Pareto frontier of memory against throughput",
    responses=answers(FrontierAnswer),
)
async def frontier(query: Annotated[Question, Query()], request: Request) -> Response:
    store = request.app.state.store

    def resolve() -> tuple[ResolvedQuestion, Tagged]:
        question = query.resolve(store, request.app.state.models)
        return question, of_question(request, question.workload, question.hardware, store)

    question, tagged = await look(store, resolve)
    return await tagged.answer(
        lambda: Content.json(operations.frontier(question.workload, **question.conditions, store=store).to_json())
    )


@ROUTES.get("/v1/trials", summary="Stored trials, newest first", responses=answers(TrialsAnswer))
async def trials(query: Annotated[TrialsQuery, Query()], request: Request) -> Response:
    store, limit = request.app.state.store, query.limit
    conditions, tagged = await look(store, lambda: (query.conditions(store), Tagged(request, store.version())))

    def listing() -> Content:
        rows = store.trials(**conditions, limit=limit, before=query.before, newest_first=True)
        following = rows[-1].trial_id if len(rows) == limit else None
        told = request.app.state.models.told
        page: dict[str, Any] = {"trials": [told(t.to_json()) for t in rows], "total": store.count(**conditions)}
        return Content.json({**page, "next": following})

    return await tagged.answer(listing)
