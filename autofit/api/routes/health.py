"""Routes for those who run the server: does it live, can it serve, and how is it doing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from autofit import __version__
from autofit.api import problems
from autofit.api.routes.common import OpenedStore
from autofit.api.schema.documents import HealthAnswer, ReadyAnswer
from autofit.core.errors import StoreError

ROUTES = APIRouter()
OPEN: dict[str, Any] = {"security": [{}]}
"""Added to what the API's description says of a route: a token may be left out."""


@ROUTES.get("/healthz", summary="Whether the server is running", openapi_extra=OPEN)
async def healthz() -> HealthAnswer:
    """Answers without a token."""
    # No thread of the pool, all of which may wait for the database.
    return HealthAnswer(status="ok", version=__version__)


@ROUTES.get(
    "/readyz",
    summary="Whether the store answers and the server's own runner lives",
    responses={200: {"model": ReadyAnswer}},
    openapi_extra=OPEN,
)
def readyz(store: OpenedStore, request: Request) -> JSONResponse:
    """Answers without a token; with status 503 if not."""
    checks: dict[str, Any] = {"store": "ok"}
    try:
        store.version()
    except StoreError:
        checks["store"] = "it does not answer"  # who may ask without a token is not told where it is
    runner = request.app.state.runner
    if runner is not None:
        checks["runner"] = "ok" if runner.is_alive() else "it has not looked for searches lately"
    wrong = [f"the {name}: {state}" for name, state in checks.items() if state != "ok"]
    if wrong:
        return problems.problem(503, "Not ready", "; ".join(wrong), **checks)
    return JSONResponse({"status": "ok", **checks})


@ROUTES.get("/metrics", summary="Figures for Prometheus", response_class=PlainTextResponse)
def metrics(request: Request) -> Response:
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    return Response(generate_latest(request.app.state.metrics.registry), media_type=CONTENT_TYPE_LATEST)
