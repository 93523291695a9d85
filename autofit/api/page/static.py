"""Files that pages load: our own, htmx, and Plotly's from its package. Nothing comes from elsewhere."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib import metadata, resources
from typing import Annotated

from fastapi import APIRouter, Header, HTTPException
from fastapi.responses import Response

TYPES = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "chart.js": "text/javascript; charset=utf-8",
    "htmx.min.js": "text/javascript; charset=utf-8",
    "plotly.min.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""Every file, with its media type."""
PREFIX = "/static/"
"""What their paths begin with. They are part of the package, and hold nothing of the store: no token is needed."""
ROUTES = APIRouter()


@cache
def address(name: str) -> str:
    """Where a file is, by an address that changes when its content may have: browsers keep it."""
    if name == "plotly.min.js":
        return f"{PREFIX}{name}?v={metadata.version('plotly')}"
    return f"{PREFIX}{name}?v={hashlib.sha256(_content(name)).hexdigest()[:12]}"


@cache
def _content(name: str) -> bytes:
    if name == "plotly.min.js":
        return resources.files("plotly").joinpath("package_data", name).read_bytes()
    return resources.files("autofit.api.page").joinpath("static", name).read_bytes()


@cache
def _packed(name: str) -> bytes:
    return gzip.compress(_content(name), 6)


@ROUTES.get(PREFIX + "{name}")
def file(name: str, accept_encoding: Annotated[str, Header()] = "") -> Response:
    if name not in TYPES:
        raise HTTPException(404)
    packed = "gzip" in accept_encoding and name.endswith((".js", ".css"))
    headers = {"Vary": "Accept-Encoding", "X-Content-Type-Options": "nosniff"}
    headers["Cache-Control"] = "public, max-age=31536000, immutable"  # for a year
    if packed:
        headers["Content-Encoding"] = "gzip"
    return Response(_packed(name) if packed else _content(name), media_type=TYPES[name], headers=headers)
