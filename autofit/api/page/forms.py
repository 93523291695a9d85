"""What forms send, and what they offer to choose from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import Depends, Request

from autofit.api.models import NamedModels
from autofit.catalog.models import names
from autofit.core.workload import METHODS, Effect, Workload
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
        "models": [name for name in (*models.own(), *names()) if name not in measured],
        "hardware": list(dict.fromkeys(hardware.name for hardware in store.hardware())),
        "methods": ("any", *METHODS),
        "effects": [effect.label for effect in Effect],
        "trainers": list(TRAINERS),
    }


USUAL = {"seq_len": 2048, "global_batch": 64, "lora_dropout": 0.0, "devices": 1, "seed": 0}
"""What the fields of a workload mean that are left out."""


def workload_query(workload: Workload | Any, **more: Any) -> dict[str, Any]:
    """The query that asks about a workload, without what is usual."""
    named = {name: getattr(workload, name) for name in USUAL}
    always = ("seq_len", "global_batch")
    kept = {name: value for name, value in named.items() if name in always or value != USUAL[name]}
    if workload.trainer is not None:
        kept["for"] = workload.trainer
    if workload.eval_batch is not None:
        kept["eval_batch"] = workload.eval_batch
    if workload.lengths is not None:
        kept["lengths"] = ",".join(map(str, getattr(workload.lengths, "tokens", workload.lengths)))
    return {"model": workload.model, **kept, **more}


def chosen(values: Iterable[tuple[str, object]]) -> dict[str, str]:
    """What a form shows as filled in; fields that were not are the usual."""
    usual = {**{name: str(value) for name, value in USUAL.items()}, "method": "any", "allow": "numerics"}
    usual |= {"model": "", "hardware": "", "memory_limit": "", "min_rank": "8", "for": ""}
    usual |= {"eval_batch": "", "lengths": ""}
    return {**usual, **{name: str(value) for name, value in values}}
