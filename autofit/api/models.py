"""Models by name: those of the catalog and of the server's own folder. A path would let a client read its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from autofit.catalog.models import names
from autofit.core.errors import unknown


@dataclass(frozen=True, slots=True)
class NamedModels:
    """What clients may name."""

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

    def in_folder(self) -> dict[str, Path]:
        """The models of the folder: only what stands directly in it, whatever a name looks like."""
        if self.folder is None or not self.folder.is_dir():
            return {}
        return {path.name: path for path in sorted(self.folder.iterdir()) if (path / "config.json").is_file()}


async def named_models(request: Request) -> NamedModels:
    """The models that the application answers for."""
    models: NamedModels = request.app.state.models
    return models


Models = Annotated[NamedModels, Depends(named_models)]
