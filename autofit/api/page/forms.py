"""What forms send, and what they offer to choose from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import Depends, Request

from autofit.api.routes.common import NamedModels
from autofit.catalog.models import names
from autofit.core.lengths import Lengths
from autofit.core.workload import METHODS, Effect, Workload
from autofit.planning.requests import WorkloadOptions, departures
from autofit.store import Store
from autofit.techniques.habits import TRAINERS


async def fields(request: Request) -> dict[str, str]:
    """The fields of a form that were filled in."""
    return dict(parse_qsl((await request.body()).decode("utf-8", "replace")))


Fields = Annotated[dict[str, str], Depends(fields)]


def choices(store: Store, models: NamedModels) -> dict[str, Any]:
    """What a workload is chosen from: measured models first."""
    measured = list(dict.fromkeys(workload.model for workload in store.workloads()))
    return {
        "measured": measured,
        "models": [name for name in (*models.in_folder(), *names()) if name not in measured],
        "hardware": list(dict.fromkeys(hardware.name for hardware in store.hardware())),
        "methods": ("any", *METHODS),
        "effects": [effect.label for effect in Effect],
        "trainers": list(TRAINERS),
    }


def workload_query(workload: WorkloadOptions | Workload, **more: Any) -> dict[str, Any]:
    """The query that asks about a workload, without what is usual."""
    parameters = departures(workload)
    parameters.pop("program", None)  # no query has one
    if "trainer" in parameters:
        parameters["for"] = parameters.pop("trainer")
    if (lengths := parameters.get("lengths")) is not None:
        parameters["lengths"] = ",".join(map(str, lengths.tokens if isinstance(lengths, Lengths) else lengths))
    return {"model": workload.model, **parameters, **more}


def chosen(values: Iterable[tuple[str, object]]) -> dict[str, str]:
    """What a form shows as filled in; fields that were not are the usual."""
    options = {option.name: option.default for option in dataclasses.fields(WorkloadOptions)}
    usual = {name: "" if value in (None, dataclasses.MISSING) else str(value) for name, value in options.items()}
    usual |= {"method": "any", "min_rank": "8", "allow": "numerics", "hardware": "", "memory_limit": "", "for": ""}
    return {**usual, **{name: str(value) for name, value in values}}
