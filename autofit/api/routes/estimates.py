"""The route that predicts what a config needs."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from autofit.api.routes.common import Models, OpenedStore, Strict
from autofit.api.routes.query import MemoryLimit, WorkloadBody, named_hardware
from autofit.api.schema.documents import EstimateAnswer
from autofit.core.units import as_bytes
from autofit.prediction.estimation import estimated

ROUTES = APIRouter(route_class=Strict)


class AskedEstimate(WorkloadBody):
    """The options of `autofit estimate`, by the same names and with the same defaults."""

    config: dict[str, str | int | bool] = Field(
        default={}, description="Axis -> value; absent axes take the plain recipe's"
    )
    hardware: str = Field(default="auto", description="Name of a card; auto: the only hardware that trials ran on")
    memory_limit: MemoryLimit = Field(default=None, description="Such as 24GiB; the card's memory if not given")
    advice: bool = Field(default=True, description="Also look for a change that makes it fit, or makes it faster")


@ROUTES.post(
    "/v1/estimates",
    summary="What a config needs, and how fast it is, predicted",
    responses={200: {"model": EstimateAnswer}},
)
def estimate(body: AskedEstimate, store: OpenedStore, models: Models, request: Request) -> JSONResponse:
    prediction = request.app.state.estimating.call(
        estimated,
        body.workload(models),
        body.config,
        hardware=named_hardware(body.hardware, store),
        memory_limit_bytes=as_bytes(body.memory_limit),
        advice=body.advice,
        store=store.url,
    )
    return JSONResponse(prediction)
