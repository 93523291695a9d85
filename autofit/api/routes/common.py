"""What all groups of routes share: the store, what they refuse before they answer, how errors are documented."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from autofit.api.middleware.access import Needs
from autofit.api.schema.documents import ProblemAnswer
from autofit.core.errors import unknown
from autofit.store import Store


class Strict(APIRoute):
    """A route that asks for the token before it reads the body, which FastAPI itself does before any dependency, and
    that refuses parameters that it does not have: ignoring them would answer a different question."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        needed = [d.dependency for d in self.dependencies if isinstance(d.dependency, Needs)]

        async def strict(request: Request) -> Response:
            for needs in needed:
                needs(request)
            if request.query_params and self.include_in_schema:
                self._check_names(request)
            return await handler(request)

        return strict

    def _check_names(self, request: Request) -> None:
        described = request.app.openapi()["paths"][self.path][request.method.lower()]
        names = [parameter["name"] for parameter in described.get("parameters", ()) if parameter["in"] == "query"]
        for name in request.query_params:
            if name not in names:
                raise unknown("parameter", name, names)


async def opened_store(request: Request) -> Store:
    """The store that the application answers from."""
    store: Store = request.app.state.store
    return store


OpenedStore = Annotated[Store, Depends(opened_store)]
PROBLEM: dict[str, Any] = {
    "description": "Problem details (RFC 9457)",
    "content": {"application/problem+json": {"schema": ProblemAnswer.model_json_schema()}},
}
