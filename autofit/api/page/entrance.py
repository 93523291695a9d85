"""Where a browser gives its token, and takes it back."""

from __future__ import annotations

from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from autofit.api.middleware.access import COOKIE
from autofit.api.page.forms import Fields
from autofit.api.page.rendering import PageRoute, render

ROUTES = APIRouter(route_class=PageRoute)


@ROUTES.get("/login")
def login(request: Request, next: str = "/") -> Response:
    return render(request, "login.html", following=_within(next), message=None)


@ROUTES.post("/login")
def enter(request: Request, given: Fields) -> Response:
    following, secret = _within(given.get("next", "/")), given.get("token", "").strip()
    if request.headers.get("sec-fetch-site") == "cross-site":  # which could log a browser in with that site's token
        return render(request, "login.html", status=403, following="/", message="the form came from another site")
    if not secret or request.app.state.token_of(secret) is None:
        return render(request, "login.html", status=401, following=following, message="this is not a valid token")
    answer = RedirectResponse(following, 303)
    secure = request.url.scheme == "https"
    month = 30 * 86400  # revoking the token ends that sooner
    answer.set_cookie(COOKIE, quote(secret, safe=""), max_age=month, httponly=True, samesite="strict", secure=secure)
    return answer


@ROUTES.post("/logout")
def leave(request: Request) -> Response:
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


def _within(address: str) -> str:
    """An address of this server: anything else becomes the start page."""
    inside = address.startswith("/") and not address.startswith("//") and "\\" not in address and address.isprintable()
    return address if inside else "/"
