"""A search request resolved before anything runs: the job, the configs, the limit, and why nothing can fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from autofit.catalog.hardware import named
from autofit.core.errors import EnvironmentLacks, UsageError
from autofit.core.lattice import Config
from autofit.core.units import format_bytes
from autofit.core.workload import Goal
from autofit.estimate.memory.lower_bound import floor_bytes
from autofit.planning.lattices import Narrowed, default_space, load_space, narrow
from autofit.planning.nothing_fits import (
    BESIDE_FLOOR_BYTES,
    WITH_OFFLOAD,
    Shortfall,
    further_memory,
    smallest_card,
    wider,
)
from autofit.planning.requests import SearchRequest, left_by_others, memory_limit
from autofit.techniques import Job, unsupported
from autofit.training.prerequisites.requirements import cannot_here
from autofit.trial.machine.detection import asked, check_alike, check_devices, detect
from autofit.workers.pool import Pool

BEYOND_FLOOR = 1.15
"""Memory that a card needs for its allocator to work at all, as a multiple of weights, gradients and states:
fragmentation is rarely less. Activations are not included: with checkpointing and short sequences they can be small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request with everything resolved, before anything runs."""

    job: Job
    narrowed: Narrowed
    space: str
    memory_limit_bytes: int

    def floor(self, config: Config) -> int:
        """The least memory that `config` can need, in bytes."""
        return floor_bytes(config, self.job)


def prepare(request: SearchRequest, pool: Pool | None = None) -> Prepared:
    """Resolve a request; raises for anything wrong with it before a worker starts."""
    wanted = asked(request.hardware, request.device)
    site = pool.site() if pool is not None else detect(request.device)
    job = request.workload.job(site)
    here = named(job.hardware.name)
    if wanted is not None and wanted != here:
        raise EnvironmentLacks(
            f"this machine has {job.hardware.name}, not {wanted.name}",
            remedy="run the search there, or give --ray-address of a cluster that has it",
        )
    devices = request.workload.devices
    if pool is None:
        check_devices(job.hardware, devices)
        if request.workers != 1 and not request.in_place:
            check_alike(job.hardware)
    limit = memory_limit(request.memory_limit_bytes, job.hardware, devices)
    if request.memory_limit_bytes is None and pool is None:
        limit = left_by_others(limit, job.hardware, devices)
    return walked(request, job, limit, cannot=cannot_here if pool is None else pool.cannot)


def walked(
    request: SearchRequest,
    job: Job,
    memory_limit_bytes: int,
    *,
    cannot: Callable[[Config, Job], str | None] = unsupported,
) -> Prepared:
    """What a search for `job` would walk; raises `NothingFits` if not even weights, gradients and states can fit.

    `cannot` says why a config cannot work (for a search that is to run, on the machines that it runs on).
    """
    space = request.space or default_space(job.hardware, job.workload.devices)
    narrowed = narrow(load_space(space), request.goal, job, cannot=cannot)
    prepared = Prepared(job=job, narrowed=narrowed, space=space, memory_limit_bytes=memory_limit_bytes)
    _check_floor(prepared, request)
    return prepared


def _check_floor(prepared: Prepared, request: SearchRequest) -> None:
    """Raise `NothingFits` if no config's weights, gradients and states fit, saying what could hold the smallest."""
    smallest = min(prepared.narrowed.lattice.configs, key=prepared.floor)
    least = prepared.floor(smallest)
    limit = prepared.memory_limit_bytes
    if least <= limit:
        return
    said = [
        f"{prepared.job.model.name} cannot fit {format_bytes(limit)}: the smallest config needs at least "
        f"{format_bytes(least)} for weights, gradients and states, and activations on top ({smallest})"
    ]
    hardware = prepared.job.hardware
    if least < hardware.memory_bytes:
        said.append(f"--memory-limit may be up to the {format_bytes(hardware.memory_bytes)} of {hardware.name}")
    said += _lower_floors(prepared, request.goal, least)
    holder = smallest_card(int(least * BEYOND_FLOOR) + BESIDE_FLOOR_BYTES - 1)
    said.append(
        "no card of the catalog could hold it"
        if holder is None
        else f"the smallest card that could hold it is {holder.name} ({format_bytes(holder.memory_bytes)})"
    )
    raise Shortfall(
        "; ".join(said),
        memory_limit_bytes=limit,
        closest={
            "config": smallest.to_json(),
            "provenance": "predicted",
            "at_least_bytes": least,
            "over_limit_bytes": least - limit,
        },
    )


def _lower_floors(prepared: Prepared, goal: Goal, least: int) -> list[str]:
    """The options that would give a search a config that needs less than `least`: another space, or a wider goal."""
    job = prepared.job
    levers = [(words, prepared.space, other) for words, other in wider(goal)]
    if WITH_OFFLOAD in further_memory(job.workload, job.hardware):
        levers.insert(0, (WITH_OFFLOAD, "offload", goal))
    found = []
    for words, space, goal_ in levers:
        with suppress(UsageError):  # a space with nothing for the goal does not help
            configs = narrow(load_space(space), goal_, job).lattice.configs
            lower = min(map(prepared.floor, configs))
            if lower < least:
                so = f"lower that to {format_bytes(lower)}" if lower else "keep all of that in host memory"
                found.append(f"{words} would {so}")
    return found


def outline(prepared: Prepared) -> dict[str, Any]:
    """The lattice of a search in figures, as a JSON object."""
    lattice = prepared.narrowed.lattice
    over = sum(prepared.floor(c) > prepared.memory_limit_bytes for c in lattice.configs)
    return {
        "hardware": prepared.job.hardware.to_json(),
        "workload": prepared.job.workload.to_json(),
        "space": prepared.space,
        "memory_limit_bytes": prepared.memory_limit_bytes,
        "configs": len(lattice.configs),
        "ruled_out_by_floor": over,
        "beyond_goal": prepared.narrowed.beyond_goal,
        "unsupported": prepared.narrowed.unsupported,
    }


def check_dry_run(request: SearchRequest) -> None:
    """Raise `UsageError` for options that make no sense if nothing runs."""
    if request.ray_address is not None:
        raise UsageError("--dry-run looks only at this machine, not at a cluster: leave --ray-address out")
    if not request.predict:
        raise UsageError("--dry-run only predicts: leave --no-predict out")
