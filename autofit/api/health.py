"""Routes for those who run the server: does it live, can it serve, and how is it doing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from autofit import __version__
from autofit.api.access import ADMIN
from autofit.api.common import STRICT, OpenedStore
from autofit.api.documents import AuditEntry
from autofit.core.errors import StoreError

ROUTES = APIRouter()


@ROUTES.head("/healthz", include_in_schema=False)  # by which some load balancers probe
@ROUTES.get("/healthz", summary="Whether the server is running")
def healthz() -> dict[str, str]:
    """Answers without a token."""
    return {"status": "ok", "version": __version__}


@ROUTES.get("/readyz", summary="Whether the store answers and the server's own runner lives")
def readyz(store: OpenedStore, request: Request) -> JSONResponse:
    """Answers without a token; with status 503 if not."""
    checks = {"store": "ok"}
    try:
        store.version()
    except StoreError:
        checks["store"] = "it does not answer"  # who may ask without a token is not told where it is
    runner = request.app.state.runner
    if runner is not None:
        checks["runner"] = "ok" if runner.is_alive() else "it has not looked for searches lately"
    ready = all(found == "ok" for found in checks.values())
    return JSONResponse({"status": "ok" if ready else "not ready", **checks}, status_code=200 if ready else 503)


@ROUTES.get("/metrics", dependencies=STRICT, summary="Figures for Prometheus", response_class=Response)
def metrics(request: Request) -> Response:
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    return Response(generate_latest(request.app.state.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@ROUTES.get(
    "/v1/audit",
    dependencies=[ADMIN, *STRICT],
    summary="Who has started and cancelled what, newest first",
    responses={200: {"model": list[AuditEntry]}},
)
def audit(store: OpenedStore) -> list[dict[str, Any]]:
    """Needs a token with the scope admin."""
    return [one.to_json() for one in store.access.audit()]
