"""Who may ask: whoever has a token of the server's environment or of the store, or anyone on this machine."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from functools import partial
from typing import Annotated
from urllib.parse import quote, unquote

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import RedirectResponse
from fastapi.security import HTTPBearer
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from autofit.api import problems
from autofit.api.look import look
from autofit.api.middleware.loopback import TOKEN_VARIABLE, names_loopback
from autofit.core.errors import StoreError
from autofit.store import OPERATOR, SCOPES, Store, Token

OPEN = ("/healthz", "/readyz", "/login", "/logout")
"""What answers without a token: those who ask whether the server lives have none, nor those who come to give one; and
a browser may always forget its own."""
COOKIE = "autofit_token"
"""Holds the token of a browser, which cannot send a header of its own when it follows a link."""
BEARER = HTTPBearer(auto_error=False, description="A token of `autofit token create`, or the operator's own")

ASKS_FOR_TOKEN = {"WWW-Authenticate": "Bearer"}
"""Headers of an answer to who has no valid token."""

TokenOf = Callable[[str], Token | None]
"""From a secret to the token that it proves."""


class Needs:
    """What a route needs that does more than read, as a dependency: the token that is used, with this scope."""

    def __init__(self, scope: str) -> None:
        self._scope = scope

    def __call__(self, request: Request) -> Token:
        """Raises `HTTPException`."""
        token: Token | None = request.state.token
        if token is None:
            detail = (
                f"what runs or writes needs a bearer token: autofit token create NAME --scope {self._scope}, "
                f"or start the server with {TOKEN_VARIABLE}"
            )
            raise HTTPException(401, detail, headers=ASKS_FOR_TOKEN)
        if not token.allows(self._scope):
            detail = f"the token {token.name!r} may {SCOPES[token.scope]}; this needs the scope {self._scope}"
            raise HTTPException(403, detail)
        return token


RUN, ADMIN = Depends(Needs("run")), Depends(Needs("admin"))
"""First of a route's dependencies: who may not ask is not told what is wrong with the request."""
MayRun = Annotated[Token, RUN]


class Guard:
    """Says of every request who asks. If `closed`, those without a token are refused; otherwise they may read, on
    `loopback` only if their Host header names this machine."""

    def __init__(self, app: ASGIApp, store: Store, token_of: TokenOf, *, closed: bool, loopback: bool) -> None:
        self._app, self._store, self._token_of = app, store, token_of
        self._closed, self._loopback = closed, loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            request.state.token = None
            if (refusal := await self._refusal(request)) is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _refusal(self, request: Request) -> Response | None:
        # What the page is made of are files of the package. Nothing here reads `request.url`: older versions of
        # Starlette let the Host header have a part of its path.
        path = request.scope["path"]
        secret, is_open = _secret(request), path in OPEN or path.startswith("/static/")
        if secret is not None:
            try:
                request.state.token = await look(self._store, partial(self._token_of, secret))
            except StoreError as error:
                if not is_open:
                    # Who has no token yet is not told where the store is.
                    logging.getLogger(__name__).warning("autofit: no token can be looked up: %s", error)
                    return problems.problem(503, "Store unavailable", "the store does not answer (ask again later)")
        if request.state.token is None:
            if self._closed and not is_open:
                refusal = problems.problem(401, "Unauthorised", "a bearer token is required", headers=ASKS_FOR_TOKEN)
                return _to_the_entrance(request) or refusal
            if self._loopback and not names_loopback(request.headers.get("host", "")):
                # By DNS rebinding, a web page could make a browser read the API for it.
                return problems.problem(421, "Misdirected request", "this server answers requests to localhost only")
        return None


def install(app: FastAPI, store: Store, *, token: str | None, closed: bool, loopback: bool) -> None:
    """Have `Guard` look at every request."""
    app.state.token_of = partial(_find_token, operators=token, store=store)
    app.add_middleware(Guard, store, app.state.token_of, closed=closed, loopback=loopback)


def _secret(request: Request) -> str | None:
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    # The scheme's name is case-insensitive (RFC 9110, section 11.1).
    if scheme.lower() == "bearer":
        return secret
    cookie = request.cookies.get(COOKIE)
    # Another site's form can neither set a header nor, as the cookie is SameSite=Strict, have the cookie sent.
    sent_by_script = request.headers.get("hx-request") == "true" or "x-requested-with" in request.headers
    return unquote(cookie) if cookie and (sent_by_script or request.method in ("GET", "HEAD")) else None


def _to_the_entrance(request: Request) -> Response | None:
    """Where a browser is sent that has no valid token; None for a program."""
    if request.headers.get("hx-request") == "true":
        return Response(status_code=401, headers={"HX-Redirect": "/login"})
    if request.method != "GET" or "text/html" not in request.headers.get("accept", ""):
        return None
    query = request.scope["query_string"].decode("latin-1")
    target = request.scope["path"] + (f"?{query}" if query else "")
    return RedirectResponse(f"/login?next={quote(target, safe='')}", 303)


def _find_token(secret: str, *, operators: str | None, store: Store) -> Token | None:
    if operators is not None and hmac.compare_digest(secret.encode(), operators.encode()):
        return Token(name=OPERATOR, scope="admin", created_at="")
    return store.access.bearer(secret)
