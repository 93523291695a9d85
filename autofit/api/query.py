"""The command line's options as query parameters."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Depends, Query

from autofit.api.common import OpenedStore
from autofit.api.models import Models
from autofit.catalog.models import names
from autofit.core.errors import NotMeasured, UsageError, unknown
from autofit.core.outcome import OUTCOME_KINDS
from autofit.core.units import LARGEST_INTEGER, as_bytes
from autofit.core.workload import Goal, Workload
from autofit.operations import WorkloadOptions
from autofit.operations.recommendation import find_hardware
from autofit.store import Store


def workload_options(
    store: OpenedStore,
    models: Models,
    model: Annotated[str, Query(description="Name of a catalog model, or of another model that was measured")],
    seq_len: Annotated[int, Query(ge=2, description="Tokens per sequence")] = 2048,
    global_batch: Annotated[int, Query(ge=1, description="Sequences per optimizer step")] = 64,
    lora_dropout: Annotated[float, Query(ge=0, lt=1)] = 0.0,
    devices: Annotated[int, Query(ge=1)] = 1,
    seed: int = 0,
) -> WorkloadOptions | Workload:
    """The workload that the query describes."""
    found = models.find(model)
    asked = WorkloadOptions.of(found or model, seq_len, global_batch, lora_dropout, devices, seed)
    if found is not None:
        return asked
    measured = store.workloads(model=model)
    if not measured:
        raise unknown("model", model, (*names(), *models.own(), *sorted({w.model for w in store.workloads()})))
    return Workload(**asdict(asked), model_digest=measured[0].model_digest)


async def memory_limit_option(
    memory_limit: Annotated[str | None, Query(description="Such as 24GiB")] = None,
) -> int | None:
    """The memory limit in bytes; raises `UsageError`."""
    return as_bytes(memory_limit)


async def goal_options(
    method: Annotated[str, Query(description="any, full, lora or qlora")] = "any",
    min_rank: Annotated[int, Query(ge=1)] = 8,
    allow: Annotated[str, Query(description="exact, numerics or training")] = "numerics",
) -> Goal:
    """How far the answer may depart from the plain recipe."""
    return Goal.of(method, min_rank, allow)


def trial_filter(
    store: OpenedStore,
    model: str | None = None,
    seq_len: Annotated[int | None, Query(ge=2, le=LARGEST_INTEGER, description="Tokens per sequence")] = None,
    global_batch: Annotated[
        int | None, Query(ge=1, le=LARGEST_INTEGER, description="Sequences per optimizer step")
    ] = None,
    lora_dropout: Annotated[float | None, Query(ge=0, lt=1)] = None,
    devices: Annotated[int | None, Query(ge=1, le=LARGEST_INTEGER)] = None,
    seed: Annotated[int | None, Query(ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)] = None,
    hardware: Annotated[str | None, Query(description="Name of hardware with trials, or auto")] = None,
    outcome: Annotated[str | None, Query(description="fits, out_of_memory, ...")] = None,
) -> dict[str, Any]:
    """Conditions on stored trials, as the store's queries take them; parameters that are not given match anything."""
    if outcome is not None and outcome not in OUTCOME_KINDS:
        raise unknown("outcome", outcome, OUTCOME_KINDS)
    name = only_hardware(store) if hardware == "auto" else hardware or ""
    workload = {
        "seq_len": seq_len,
        "global_batch": global_batch,
        "lora_dropout": lora_dropout,
        "devices": devices,
        "seed": seed,
    }
    return {
        "model": model,
        "outcome": outcome,
        "hardware_key": None if hardware is None else find_hardware(name, store).key,
        "workload": {name: value for name, value in workload.items() if value is not None},
    }


WorkloadQuery = Annotated[WorkloadOptions | Workload, Depends(workload_options)]
GoalQuery = Annotated[Goal, Depends(goal_options)]
MemoryLimitQuery = Annotated[int | None, Depends(memory_limit_option)]
TrialQuery = Annotated[dict[str, Any], Depends(trial_filter)]


def question(
    store: OpenedStore,
    workload: WorkloadQuery,
    goal: GoalQuery,
    memory_limit_bytes: MemoryLimitQuery,
    hardware: Annotated[str, Query(description="Name of hardware with trials; auto: the only one")] = "auto",
) -> dict[str, Any]:
    """What the operations that answer are asked."""
    name = only_hardware(store) if hardware == "auto" else hardware
    return {"asked": workload, "goal": goal, "memory_limit_bytes": memory_limit_bytes, "hardware": name}


def only_hardware(store: Store) -> str:
    """The name of the only hardware that trials ran on: what the server itself has is not what its clients mean."""
    names = sorted({hardware.name for hardware in store.hardware()})
    if len(names) > 1:
        raise UsageError(f"name the hardware: {', '.join(names)}")
    if not names:
        raise NotMeasured("nothing has been measured yet", remedy="name the hardware, or start a search")
    return names[0]


Question = Annotated[dict[str, Any], Depends(question)]
