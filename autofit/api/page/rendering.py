"""From values to HTML: the templates, what every page carries, and errors as sentences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import parse_qsl, urlencode

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from autofit import __version__
from autofit.api.page.static import address
from autofit.api.problems import detail_of, first_mistake, status_of
from autofit.core.errors import AutofitError
from autofit.core.units import format_bytes, format_duration
from autofit.techniques.short_text import short

HEADERS = {
    # Plotly styles its elements with attributes, and draws its buttons from data.
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "private, no-cache",
    "Vary": "HX-Request",
}

_log = logging.getLogger(__name__)
_templates = Environment(
    loader=PackageLoader("autofit.api.page"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters |= {
    "size": format_bytes,
    "duration": format_duration,
    "short": short,
    "number": lambda value: f"{value:,.0f}",
    "percent": lambda share: "unknown" if share is None else f"{share:.1%}",
    "capitalize_first": lambda text: _begun(text),
    "words": lambda name: str(name).replace("_", " "),
    "query": lambda values: urlencode({name: value for name, value in values.items() if value not in (None, "")}),
    "moment": lambda text: text[:16].replace("T", " "),
}
_templates.globals |= {"version": __version__, "static": address}


def _begun(text: str) -> str:
    """A sentence from its capital on; the name of a field or an option that it begins with stays."""
    return text[:1].upper() + text[1:] if text.partition(" ")[0].isalpha() else text


def is_partial(request: Request) -> bool:
    """Whether htmx asks, which puts the answer into the page that it has."""
    headers = request.headers
    # With the second header it asks for the whole page that it had before.
    return headers.get("hx-request") == "true" and "hx-history-restore-request" not in headers


def render(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    token = request.state.token
    text = _templates.get_template(template).render(
        **values, path=request.scope["path"], asker=None if token is None else token.name
    )
    return HTMLResponse(text, status_code=status, headers=HEADERS)


def sentence(request: Request, message: str, status: int, *, login: str | None = None) -> HTMLResponse:
    """An error, in the page that asked for it; `login`: where a token is given that might help."""
    template = "_error.html" if is_partial(request) else "error.html"
    return render(request, template, status=status, message=message, login=login)


class PageRoute(APIRoute):
    """A route whose errors are sentences in a page, and to which fields left empty are fields not given."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            query = request.scope["query_string"].decode("latin-1")
            request.scope["query_string"] = urlencode(parse_qsl(query)).encode()
            try:
                return await answer(request)
            except Exception as error:
                return _as_sentence(request, error)

        return handler


def _as_sentence(request: Request, error: Exception) -> Response:
    if isinstance(error, AutofitError):
        return sentence(request, detail_of(request, error), status_of(error)[0])
    if isinstance(error, RequestValidationError | ValidationError):
        return sentence(request, first_mistake(error), 400)
    if isinstance(error, HTTPException):
        is_refused = error.status_code in (401, 403)
        login = f"/login?{urlencode({'next': request.scope['path']})}" if is_refused else None
        return sentence(request, str(error.detail), error.status_code, login=login)
    _log.exception("autofit: %s %s", request.method, request.scope["path"])
    return sentence(request, "an unexpected error; see the server's log", 500)
