"""The API's description for people, from the same document as `/openapi.json`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from autofit.api.page.rendering import PageRoute, render

ROUTES = APIRouter(route_class=PageRoute)


@ROUTES.get("/docs")
def docs(request: Request) -> Response:
    described = request.app.openapi()
    operations = [
        {"path": path, "verb": verb.upper(), "body": _body(described, operation), **operation}
        for path, verbs in described["paths"].items()
        for verb, operation in verbs.items()
    ]
    return render(request, "docs.html", info=described["info"], operations=operations)


def _body(described: dict[str, Any], operation: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request's body, by name; empty where there is none."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    properties: dict[str, Any] = described.get("components", {}).get("schemas", {}).get(name, {}).get("properties", {})
    return properties
