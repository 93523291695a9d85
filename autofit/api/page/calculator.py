"""The calculator: what a config needs, predicted while one types."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from autofit.api.page.rendering import PageRoute, is_partial, render
from autofit.api.routes.common import Models, OpenedStore
from autofit.api.routes.query import named_hardware
from autofit.catalog.hardware import cards
from autofit.catalog.models import names
from autofit.operations import WorkloadOptions
from autofit.operations.service.prediction_process import PredictionProcess
from autofit.prediction.estimation import estimated
from autofit.techniques import AXES

ROUTES = APIRouter(route_class=PageRoute)
FORM_AXES = ("method", "rank", "micro_batch", "checkpointing", "optimizer", "precision", "loss", "attention", "kernels")
"""The axes that the form has; the others take the plain recipe's values."""
FIRST = {"model": "llama-3.1-8b", "hardware": "rtx-4090", "seq_len": 2048, "global_batch": 64}
"""What is asked about where a field is not given."""
FIRST_CONFIG = {"method": "qlora", "micro_batch": 4}
"""What the form shows beside it before anything is chosen."""


def estimate_request(
    request: Request,
    models: Models,
    store: OpenedStore,
    model: str = str(FIRST["model"]),
    hardware: str = str(FIRST["hardware"]),
    seq_len: Annotated[int, Query(ge=2, le=2**24)] = 2048,
    global_batch: Annotated[int, Query(ge=1, le=2**20)] = 64,
) -> Callable[..., dict[str, Any]]:
    """The call for the estimating process, which still needs `advice` and `store`."""
    given = request.query_params
    config = {axis.name: axis.parse(given[axis.name]) for axis in AXES if axis.name in FORM_AXES and axis.name in given}
    if config.get("method", "full") == "full":
        config.pop("rank", None)  # the field is there, whatever the method
    options = WorkloadOptions(model=models.named(model), seq_len=seq_len, global_batch=global_batch)
    return partial(estimated, options, config, hardware=named_hardware(hardware, store))


EstimateRequest = Annotated[Callable[..., dict[str, Any]], Depends(estimate_request)]


@ROUTES.get("/calculator")
def calculator(request: Request, models: Models) -> Response:
    """The form; it asks for its answer itself."""
    process: PredictionProcess = request.app.state.estimating
    process.warm()
    given = dict(request.query_params)
    estimable = [card.name for card in cards() if "estimate" in card.supports]
    return render(
        request,
        "calculator.html",
        values={**FIRST, **(given or FIRST_CONFIG)},
        axes=[axis for axis in AXES if axis.name in FORM_AXES],
        models=(*models.in_folder(), *names()),
        hardware=estimable,
    )


@ROUTES.get("/calculator/answer")
def answer(request: Request, predict: EstimateRequest, store: OpenedStore) -> Response:
    estimate = request.app.state.estimating.call(predict, advice=False, store=store.url)
    template = "_estimate.html" if is_partial(request) else "estimate.html"
    return render(request, template, estimate=estimate, query=dict(request.query_params))


@ROUTES.get("/calculator/advice")
def advice(request: Request, predict: EstimateRequest, store: OpenedStore) -> Response:
    """The other process looks for advice: it takes seconds, and the next answer must not wait for it."""
    estimate = request.app.state.predicting.call(predict, advice=True, store=store.url)
    return render(request, "_advice.html", estimate=estimate)
