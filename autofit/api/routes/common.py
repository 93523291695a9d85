"""What all routes share: the store, the models that clients may name, and what is refused at once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from autofit.api.middleware.access import Needs
from autofit.api.schema.documents import ProblemAnswer
from autofit.catalog.models import names
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
        described = request.app.openapi()["paths"][self.path][request.method.lower()]  # made once, and kept
        names = [parameter["name"] for parameter in described.get("parameters", ()) if parameter["in"] == "query"]
        for name in request.query_params:
            if name not in names:
                raise unknown("parameter", name, names)


async def opened_store(request: Request) -> Store:
    store: Store = request.app.state.store
    return store


OpenedStore = Annotated[Store, Depends(opened_store)]


@dataclass(frozen=True, slots=True)
class NamedModels:
    """The models that clients may name: the catalog's, and those of a folder of the server. A path would let a client
    read its files."""

    folder: Path | None = None
    """Holds a folder with a `config.json` for each model of the server's own; None for the catalog alone."""

    def find(self, name: str) -> str | None:
        """The model's name in the catalog, or the path of its folder on the server; None if it is neither."""
        if name.lower() in names():
            return name
        return str(self.in_folder()[name]) if name in self.in_folder() else None

    def named(self, name: str) -> str:
        """The same as `find`; raises `UsageError` where that is None."""
        address = self.find(name)
        if address is None:
            raise unknown("model", name, (*names(), *self.in_folder()))
        return address

    def by_name(self, text: str) -> str:
        """A text in which the models of the folder go by the names by which clients know them."""
        return text if self.folder is None else text.replace(f"{self.folder}/", "")

    def told(self, document: Any) -> Any:
        """A JSON document whose texts say it so, however deep they stand."""
        if self.folder is None:
            return document
        if isinstance(document, str):
            return self.by_name(document)
        if isinstance(document, Mapping):
            return {name: self.told(value) for name, value in document.items()}
        return [self.told(value) for value in document] if isinstance(document, list | tuple) else document

    def in_folder(self) -> dict[str, Path]:
        """The models of the folder: only what stands directly in it, whatever a name looks like."""
        if self.folder is None or not self.folder.is_dir():
            return {}
        return {path.name: path for path in sorted(self.folder.iterdir()) if (path / "config.json").is_file()}


async def named_models(request: Request) -> NamedModels:
    models: NamedModels = request.app.state.models
    return models


Models = Annotated[NamedModels, Depends(named_models)]
PROBLEM: dict[str, Any] = {
    "description": "Problem details (RFC 9457)",
    "content": {"application/problem+json": {"schema": ProblemAnswer.model_json_schema()}},
}
