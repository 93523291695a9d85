"""Files that pages load: our own, htmx, and Plotly's from its package. Nothing comes from elsewhere."""

from __future__ import annotations

import os

from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

PREFIX = "/static"
"""What their paths begin with. They are part of the package, and hold nothing of the store: no token is needed."""
NAMES = ("page.css", "page.js", "chart.js", "htmx.min.js", "plotly.min.js", "icon.svg")
"""Every file that is served: Plotly's folder has others."""


def address(name: str) -> str:
    """Where a file is. Browsers ask each time whether theirs is still the same."""
    return f"{PREFIX}/{name}"


class _Files(StaticFiles):
    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        return super().lookup_path(path) if path in NAMES else ("", None)

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update({"X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"})
        return response


FILES = GZipMiddleware(_Files(packages=[("autofit.api.page", "static"), ("plotly", "package_data")]), compresslevel=6)
