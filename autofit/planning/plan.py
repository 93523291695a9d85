"""A search request resolved before anything runs: the job, the configs, the limit, and why nothing can fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from autofit.catalog.hardware import card_of
from autofit.core.errors import EnvironmentLacks, Shortfall, UsageError
from autofit.core.lattice import Config
from autofit.core.outcome import DEADLINE_SECONDS
from autofit.core.units import format_bytes
from autofit.core.workload import Goal, digest
from autofit.estimate.memory.lower_bound import floor_bytes
from autofit.planning.lattices import Narrowed, default_space, load_space, narrow
from autofit.planning.nothing_fits import WITH_OFFLOAD, further_memory, holder, wider
from autofit.planning.requests import SearchRequest, memory_limit, memory_limit_here
from autofit.techniques import Job, unsupported
from autofit.training.prerequisites.requirements import why_not_trainable
from autofit.trial.machine.detection import check_alike, check_devices, detect, requested_card
from autofit.trial.program.command import Command
from autofit.workers.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a search must end, whatever it has found."""

    memory_bytes: int
    max_trials: int | None = None
    """Including verification."""
    seconds: float | None = None
    deadline_seconds: float = DEADLINE_SECONDS
    """Deadline of one trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Narrowed):
    """A search request with everything resolved, before anything runs."""

    job: Job
    lower_bounds: Mapping[Config, int]
    """The least memory that each config of the lattice can need, in bytes: its weights, gradients and states."""
    goal: Goal
    """The user's: where speeds tie, the config that changes least relative to its plain recipe wins."""
    limits: Limits
    thorough: bool = False
    """Whether to go on for the frontier of every method once the best config is found, as long as the limits allow."""
    space: str = ""
    """Name or file of the space that the lattice comes from."""

    @property
    def lattice_digest(self) -> str:
        return digest([config.key for config in self.lattice.configs])

    @property
    def possible(self) -> list[Config]:
        """The configs whose lower bound is within the memory limit."""
        return [c for c in self.lattice.configs if self.lower_bounds[c] <= self.limits.memory_bytes]


def resolve(request: SearchRequest, pool: Pool | None = None) -> Plan:
    """Resolve a request; raises for anything wrong with it before a worker starts."""
    requested = requested_card(request.hardware, request.device)
    site = pool.site() if pool is not None else detect(request.device)
    job = request.workload.job(site)
    present = card_of(job.hardware.name)
    if requested is not None and requested != present:
        raise EnvironmentLacks(
            f"this machine has {job.hardware.name}, not {requested.name}",
            remedy="run the search there, give --ray-address of a cluster that has it, or --dry-run to predict it here",
        )
    devices = request.workload.devices
    if pool is None:
        check_devices(job.hardware, devices)
        if job.workload.program is not None:
            Command.parse(job.workload.program).check_found()
        if request.workers != 1 and not request.in_place:
            check_alike(job.hardware)
    limit_of = memory_limit_here if pool is None else memory_limit
    limit = limit_of(request.memory_limit_bytes, job.hardware, devices)
    return resolve_for(request, job, limit, cannot=why_not_trainable if pool is None else pool.cannot)


def resolve_for(
    request: SearchRequest,
    job: Job,
    memory_limit_bytes: int,
    *,
    cannot: Callable[[Config, Job], str | None] = unsupported,
) -> Plan:
    """The plan for `job`; `cannot` says why a config cannot work. Raises `NothingFits` if no config's weights and
    states fit."""
    space = request.space or default_space(job.hardware, job.workload.devices)
    narrowed = narrow(load_space(space), request.goal, job, cannot=cannot)
    if job.workload.program is not None:
        Command.parse(job.workload.program).check_takes(narrowed.lattice.configs)
    plan = Plan(
        job=job,
        lattice=narrowed.lattice,
        lower_bounds={config: floor_bytes(config, job) for config in narrowed.lattice.configs},
        goal=request.goal,
        limits=Limits(
            memory_bytes=memory_limit_bytes, max_trials=request.max_trials, seconds=request.time_budget_seconds
        ),
        thorough=request.thorough,
        space=space,
        unsupported=narrowed.unsupported,
        beyond_goal=narrowed.beyond_goal,
    )
    _check_lower_bounds(plan)
    return plan


def _check_lower_bounds(plan: Plan) -> None:
    """Raise `NothingFits` if no config's weights, gradients and states fit, saying what could hold the smallest."""
    smallest = min(plan.lattice.configs, key=plan.lower_bounds.__getitem__)
    limit, hardware = plan.limits.memory_bytes, plan.job.hardware
    least = plan.lower_bounds[smallest]
    if least <= limit:
        return
    sentences = [
        f"{plan.job.model.name} cannot fit {format_bytes(limit)}: the smallest config needs at least "
        f"{format_bytes(least)} for weights, gradients and states, and activations on top ({smallest})"
    ]
    if least < hardware.memory_bytes:
        sentences.append(f"--memory-limit may be up to the {format_bytes(hardware.memory_bytes)} of {hardware.name}")
    sentences += _what_lowers_them(plan, least)
    sentences.append(holder(least))
    raise Shortfall(
        "; ".join(sentences),
        memory_limit_bytes=limit,
        closest={
            "config": smallest.to_json(),
            "provenance": "predicted",
            "at_least_bytes": least,
            "over_limit_bytes": least - limit,
        },
    )


def _what_lowers_them(plan: Plan, least: int) -> list[str]:
    """The options that would give a search a config that needs less than `least`: another space, or a wider goal."""
    job = plan.job
    levers = [(words, plan.space, other) for words, other in wider(plan.goal)]
    if WITH_OFFLOAD in further_memory(job.workload, job.hardware):
        levers.insert(0, (WITH_OFFLOAD, "offload", plan.goal))
    sentences = []
    for words, space, goal in levers:
        with suppress(UsageError):  # a space with nothing for the goal does not help
            configs = narrow(load_space(space), goal, job).lattice.configs
            lower = min(floor_bytes(config, job) for config in configs)
            if lower < least:
                so = f"lower that to {format_bytes(lower)}" if lower else "keep all of that in host memory"
                sentences.append(f"{words} would {so}")
    return sentences


def outline(plan: Plan) -> dict[str, Any]:
    """The lattice of a search in figures, as a JSON object."""
    return {
        "hardware": plan.job.hardware.to_json(),
        "workload": plan.job.workload.to_json(),
        "space": plan.space,
        "memory_limit_bytes": plan.limits.memory_bytes,
        "configs": len(plan.lattice.configs),
        "ruled_out_by_floor": len(plan.lattice.configs) - len(plan.possible),
        "beyond_goal": plan.beyond_goal,
        "unsupported": dict(plan.unsupported),
    }


def check_dry_run(request: SearchRequest) -> None:
    """Raise `UsageError` for options that make no sense if nothing runs."""
    if request.ray_address is not None:
        raise UsageError("--dry-run looks only at this machine, not at a cluster: leave --ray-address out")
    if not request.predict:
        raise UsageError("--dry-run only predicts: leave --no-predict out")
