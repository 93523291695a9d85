"""What several groups of routes share: the store, the refusal of unknown parameters, how errors are documented."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

from autofit.api.documents import ProblemAnswer
from autofit.core.errors import unknown
from autofit.store import Store


async def opened_store(request: Request) -> Store:
    """The store that the application answers from."""
    found: Store = request.app.state.store
    return found


async def refuse_other_parameters(request: Request) -> None:
    """Reject parameters that the route does not have: ignoring them would answer a different question."""
    described = request.app.openapi()["paths"][request.scope["route"].path][request.method.lower()]
    names = [parameter["name"] for parameter in described.get("parameters", ()) if parameter["in"] == "query"]
    for name in request.query_params:
        if name not in names:
            raise unknown("parameter", name, names)


OpenedStore = Annotated[Store, Depends(opened_store)]
STRICT = [Depends(refuse_other_parameters)]
PROBLEM: dict[str, Any] = {
    "description": "Problem details (RFC 9457)",
    "content": {"application/problem+json": {"schema": ProblemAnswer.model_json_schema()}},
}
