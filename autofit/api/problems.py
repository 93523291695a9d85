"""Errors over HTTP: problem details (RFC 9457)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from autofit.core.errors import AutofitError, EnvironmentLacks, NothingFits, Shortfall, StoreError, UsageError
from autofit.operations.service.prediction_process import Overloaded
from autofit.store import KeyReused, QueueFull

STATUSES: tuple[tuple[type[AutofitError], int, str], ...] = (
    (KeyReused, 422, "Key used before"),
    (QueueFull, 429, "Too many searches"),
    (UsageError, 400, "Wrong request"),
    (NothingFits, 404, "Nothing fits"),
    (StoreError, 503, "Store unavailable"),
    (Overloaded, 503, "Overloaded"),
    (EnvironmentLacks, 404, "Not measured"),
    (AutofitError, 500, "Internal error"),
)
"""Error class, HTTP status and title; the first class that an error is an instance of decides."""
_OPTION = re.compile(r"autofit [^)`;]*|(?<![\w-])--(?P<option>[a-z][a-z-]*)")
"""A command up to its end, or an option outside of one."""


def problem(
    status: int, title: str, detail: str, *, headers: Mapping[str, str] | None = None, **more: Any
) -> JSONResponse:
    """A response of media type application/problem+json, with `more` members."""
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail, **more}
    return JSONResponse(body, status_code=status, headers=headers, media_type="application/problem+json")


def status_of(error: AutofitError) -> tuple[int, str]:
    return next((status, title) for kind, status, title in STATUSES if isinstance(error, kind))


def detail_of(request: Request, error: AutofitError) -> str:
    """The error in words, as clients know the things: options by their parameters' names, but for those of a command
    to run, and models of the server's own folder by theirs."""
    text = request.app.state.models.by_name(str(error))
    return _OPTION.sub(lambda found: (found["option"] or "").replace("-", "_") or found[0], text)


def first_mistake(error: RequestValidationError | ValidationError) -> str:
    """What is wrong with the first field that is."""
    first: Mapping[str, Any] = error.errors()[0]
    where = [str(part) for part in first["loc"]]
    if where[:1] in (["query"], ["path"], ["header"], ["body"]):
        del where[0]
    return f"{'.'.join(where) or 'the body'}: {first['msg'].removeprefix('Value error, ')}"


def install(app: FastAPI) -> None:
    """Turn every error of the application into a problem document."""

    @app.exception_handler(AutofitError)
    async def foreseen(request: Request, error: AutofitError) -> JSONResponse:
        status, title = status_of(error)
        more = error.facts() if isinstance(error, Shortfall) else {}
        headers = {"Retry-After": "60"} if isinstance(error, Overloaded) else None
        return problem(status, title, detail_of(request, error), headers=headers, **more)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        # Starlette takes a body of another type for text.
        is_json = "json" in request.headers.get("content-type", "")
        is_text = not is_json and error.errors()[0]["loc"] == ("body",)
        detail = "the body must be JSON: send Content-Type: application/json" if is_text else first_mistake(error)
        return problem(400, "Wrong request", detail)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        titles = {401: "Unauthorised", 403: "Forbidden", 404: "Not found", 413: "Too large"}
        title = titles.get(error.status_code, "Error")
        response = problem(error.status_code, title, str(error.detail), headers=error.headers)
        described = request.app.openapi()["paths"].get(getattr(request.scope.get("route"), "path", ""))
        if error.status_code == 405 and described:
            # Each verb is a route of its own, and the first one speaks for itself.
            response.headers["Allow"] = ", ".join(verb.upper() for verb in described)
        return response

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return problem(500, "Internal error", "an unexpected error; see the server's log")
