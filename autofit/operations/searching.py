"""A search from the user's request to the recommendation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autofit.catalog.hardware import card
from autofit.errors import EnvironmentLacks, NothingFits, StoreError, UsageError
from autofit.estimate.floor import floor_bytes
from autofit.frontier import Frontier, Recommendation
from autofit.lattice import Config
from autofit.operations.answers import recommendation
from autofit.operations.foreseeing import foresee
from autofit.operations.keeping import Keeper
from autofit.operations.lattices import Narrowed, default_space, load_space, narrow
from autofit.operations.requests import SearchRequest, left_by_others, memory_limit
from autofit.operations.shortfall import (
    CONTEXT_BYTES,
    WITH_OFFLOAD,
    Shortfall,
    further_memory,
    levers,
    of_failures,
    smallest_card,
    wider,
)
from autofit.outcome import Crashed, Diverged, Fits, OutOfMemory, TimedOut, Trial
from autofit.store import Store
from autofit.techniques import Job, unsupported
from autofit.training.requirements import cannot_here
from autofit.trial.site import check_devices, detect
from autofit.units import format_bytes
from autofit.workers.pool import Pool
from autofit.workload import Goal

if TYPE_CHECKING:
    # Imported where it is used: Optuna takes a quarter of a second that an answer from the store need not wait for.
    from autofit.search.loop import Progress, Search

BEYOND_FLOOR = 1.15
"""What a card must hold over weights, gradients and states for its allocator to work at all: fragmentation is rarely
less. Activations are not in it: with checkpointing and short sequences they can be small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """How a search ended."""

    search_id: str
    recommendation: Recommendation
    frontier: Frontier
    trials: int
    """Trials that this search ran, verification included."""
    out_of_memory: int
    ruled_out: int
    answered_from_store: int
    seconds: float
    stopped_because: str
    regret_bound: float | None = None
    """By what share of the best speed of its method the recommended config is at most slower, with 95 % confidence;
    None where the search that has found it did not say."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "search_id": self.search_id,
            "recommendation": self.recommendation.to_json(),
            "frontier": self.frontier.to_json(),
            "trials": self.trials,
            "out_of_memory": self.out_of_memory,
            "ruled_out": self.ruled_out,
            "answered_from_store": self.answered_from_store,
            "seconds": self.seconds,
            "stopped_because": self.stopped_because,
            "regret_bound": self.regret_bound,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request with everything resolved, before anything runs."""

    job: Job
    narrowed: Narrowed
    space: str
    memory_limit_bytes: int

    def floor(self, config: Config) -> int:
        """The least memory that `config` can need, bytes."""
        return floor_bytes(config, self.job)


def prepare(request: SearchRequest, pool: Pool | None = None) -> Prepared:
    """Resolve a request; raises for whatever is wrong with it before a worker starts."""
    site = pool.site() if pool is not None else detect(request.device)
    job = request.workload.job(site)
    if request.hardware.lower() not in ("auto", job.hardware.name):
        card(request.hardware)  # names the nearest if there is no such card
        raise EnvironmentLacks(
            f"this machine has {job.hardware.name}, not {request.hardware}",
            remedy="run the search there, or give --ray-address of a cluster that has it",
        )
    devices = request.workload.devices
    if pool is None:
        check_devices(job.hardware, devices)
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

    `cannot` says why a config cannot work, on the machines that the search runs on if it runs at all.
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
    holder = smallest_card(int(least * BEYOND_FLOOR) + CONTEXT_BYTES - 1)
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
    """The levers with which a search has a config that needs less than `least`: another space, or a wider goal."""
    job = prepared.job
    levers = [(words, prepared.space, other) for words, other in wider(goal)]
    if WITH_OFFLOAD in further_memory(job.workload, job.hardware):
        levers.insert(0, (WITH_OFFLOAD, "offload", goal))
    found = []
    for words, space, goal_ in levers:
        with suppress(UsageError):  # a space that has nothing for the goal is no lever
            configs = narrow(load_space(space), goal_, job).lattice.configs
            lower = min(map(prepared.floor, configs))
            if lower < least:
                so = f"lower that to {format_bytes(lower)}" if lower else "keep all of that in host memory"
                found.append(f"{words} would {so}")
    return found


def check_dry_run(request: SearchRequest) -> None:
    """Raise `UsageError` for what makes no sense where nothing runs."""
    if request.ray_address is not None:
        raise UsageError("--dry-run looks at this machine and asks no cluster: leave --ray-address out")
    if not request.predict:
        raise UsageError("--dry-run does nothing but predict: leave --no-predict out")


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


def search(request: SearchRequest, report: Callable[[Progress], None] = lambda progress: None) -> SearchResult:
    """Search for the fastest config that fits.

    Every trial is committed as it ends: interrupted or killed, the same request goes on from there. Raises
    `NothingFits` if nothing does, `EnvironmentLacks` if the machine cannot run trials.
    """
    started = time.monotonic()
    pool = open_pool(request) if request.ray_address is not None else None
    try:
        prepared = prepare(request, pool)
        with Store.open(request.store) as store:
            return _run(request, prepared, store, pool, report, started)
    finally:
        if pool is not None:
            pool.close()


def open_pool(request: SearchRequest) -> Pool:
    """The workers that the request asks for."""
    if request.in_place:
        from autofit.workers.in_place import InPlacePool

        return InPlacePool(device=request.device, devices=request.workload.devices)
    from autofit.workers.ray_pool import RayPool

    accelerator = None
    if request.ray_address is not None and request.hardware.lower() != "auto":
        accelerator = card(request.hardware).ray_accelerator_type
    return RayPool(
        address=request.ray_address,
        workers=request.workers,
        devices=request.workload.devices,
        device=request.device,
        accelerator=accelerator,
    )


def _run(
    request: SearchRequest,
    prepared: Prepared,
    store: Store,
    pool: Pool | None,
    report: Callable[[Progress], None],
    started: float,
) -> SearchResult:
    from autofit.search.foresight import Foresight
    from autofit.search.loop import Limits, Search

    job = prepared.job
    search_id, answered = _begin(request, prepared, store)
    keeper = Keeper(store, search_id)

    def shown(progress: Progress) -> None:
        # After every trial of a batch is kept: what one worker has measured must not be lost for another's.
        keeper.check()
        report(progress)

    def foreseen(told: Callable[[int, int], None]) -> Foresight:
        if not request.predict:
            return Foresight()
        return foresee(
            job,
            [c for c in prepared.narrowed.lattice.configs if prepared.floor(c) <= prepared.memory_limit_bytes],
            memory_limit_bytes=prepared.memory_limit_bytes,
            seconds=request.time_budget_seconds,
            store=store,
            report=told,
            one_host=request.ray_address is None,
        )

    found = Search(
        job=job,
        lattice=prepared.narrowed.lattice,
        methods=request.goal.methods,
        goal=request.goal,
        limits=Limits(
            memory_bytes=prepared.memory_limit_bytes,
            max_trials=request.max_trials,
            seconds=request.time_budget_seconds,
        ),
        floor=prepared.floor,
        known=store.known(
            hardware_key=job.hardware.key,
            stack_key=job.stack.key,
            workload_key=job.workload.key,
            search_id=search_id if request.fresh else None,
        ),
        open_pool=(lambda: pool) if pool is not None else (lambda: open_pool(request)),
        foresee=foreseen,
        save=keeper.keep,
        report=shown,
        between=lambda: store.between_executions(job.hardware.key),
        thorough=request.thorough,
        answer_only=answered,
    )
    with nullcontext() if answered else _its_end_noted(store, search_id, found):
        found.run()
        return _result(request, prepared, found, store, search_id, time.monotonic() - started)


def _begin(request: SearchRequest, prepared: Prepared, store: Store) -> tuple[str, bool]:
    """The search's id, and whether an earlier one has answered it; if not, it is in the store from here on."""
    job = prepared.job
    question = request.question(job, prepared.memory_limit_bytes, prepared.narrowed.digest)
    answered = None if request.fresh else _already_answered(store, question, request)
    if answered is not None:
        return answered, True
    begun = _begun_afresh(store, question) if request.fresh else None
    search_id = begun or uuid.uuid4().hex
    store.begin_search(
        search_id,
        hardware=job.hardware,
        stack=job.stack,
        workload=job.workload,
        request={
            "question": question,
            "fresh": request.fresh,
            "max_trials": request.max_trials,
            "seconds": request.time_budget_seconds,
        },
    )
    return search_id, False


@contextmanager
def _its_end_noted(store: Store, search_id: str, found: Search) -> Iterator[None]:
    """Note in the store how the search inside has ended."""
    status = "failed"
    try:
        yield
        status = "done"
    except NothingFits:
        if found.knowledge.trials or not found.beyond_host:
            status = "done"  # an answer, too; without a trial nothing in the store could give it again
        raise
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        # Every trial is kept by now. A note on how the search ended is not worth the answer or the true failure.
        with suppress(StoreError):
            ended = {
                "stopped_because": found.progress.stopped_because,
                "ruled_out": _ruled_out(found, store, search_id),
                "regret_bound": _regret_bound(found, store, search_id),
            }
            store.end_search(search_id, status, ended)


def _already_answered(store: Store, question: dict[str, Any], request: SearchRequest) -> str | None:
    """The id of a search that ended and has asked the same with at least this budget; None if there is none."""
    for earlier in store.searches():
        asked = earlier.request
        if earlier.status != "done" or asked.get("question") != question:
            continue
        if _at_least(asked["max_trials"], request.max_trials) and _at_least(
            asked["seconds"], request.time_budget_seconds
        ):
            return earlier.search_id
    return None


def _begun_afresh(store: Store, question: dict[str, Any]) -> str | None:
    """The id of a search that has asked the same afresh and was interrupted or killed: it goes on with the trials that
    are its own. None if there is none, or if a later search has answered the question."""
    for earlier in store.searches():
        if earlier.request.get("question") != question:
            continue
        if earlier.status == "done":
            return None
        if earlier.request.get("fresh"):
            return earlier.search_id
    return None


def _at_least(spent: float | None, asked: float | None) -> bool:
    return spent is None or (asked is not None and spent >= asked)


def _result(
    request: SearchRequest, prepared: Prepared, found: Search, store: Store, search_id: str, seconds: float
) -> SearchResult:
    job = prepared.job
    trials: list[Trial] = list(found.knowledge.trials.values())
    if not trials and found.beyond_host:
        raise _host_too_small(found.beyond_host, prepared)
    _check_any_fits(trials or store.trials(search_id=search_id), prepared, request.goal)
    # Counted as `frontier` counts them: every attempt of this hardware, stack and workload.
    context: dict[str, Any] = {
        "hardware_key": job.hardware.key,
        "stack_key": job.stack.key,
        "workload_key": job.workload.key,
    }
    frontier = Frontier.of(
        found.knowledge.measured(),
        hardware=job.hardware,
        workload=job.workload,
        stack=job.stack,
        trials=store.count(**context),
        out_of_memory=store.count(**context, outcome=OutOfMemory.kind),
        contradictory=found.knowledge.contradictory,
    )
    return SearchResult(
        search_id=search_id,
        recommendation=recommendation(
            frontier, memory_limit_bytes=prepared.memory_limit_bytes, goal=request.goal, tried=lambda: trials
        ),
        frontier=frontier,
        trials=found.progress.done,
        out_of_memory=found.progress.out_of_memory,
        ruled_out=_ruled_out(found, store, search_id),
        answered_from_store=found.progress.from_store,
        seconds=seconds,
        stopped_because=found.progress.stopped_because,
        regret_bound=_regret_bound(found, store, search_id),
    )


def _ruled_out(found: Search, store: Store, search_id: str) -> int:
    """Of an answer from the store, which predicts nothing, what the search said that gave it."""
    kept = _said_earlier("ruled_out", found, store, search_id)
    return found.progress.ruled_out if kept is None else int(kept)


def _regret_bound(found: Search, store: Store, search_id: str) -> float | None:
    """The same of the bound."""
    kept = _said_earlier("regret_bound", found, store, search_id)
    return found.progress.regret_bound if kept is None else float(kept)


def _said_earlier(what: str, found: Search, store: Store, search_id: str) -> Any:
    earlier = store.search(search_id) if found.answer_only else None
    return (earlier.result or {}).get(what) if earlier is not None else None


def _host_too_small(beyond_host: Mapping[Config, int], prepared: Prepared) -> Shortfall:
    """Nothing was run, because the memory of a host is predicted to be too small for what devices would hold."""
    config, lacking = min(beyond_host.items(), key=lambda item: item[1])
    there = prepared.job.hardware.host_memory_bytes
    return Shortfall(
        f"no config of {prepared.job.model.name} is predicted to fit: the one that asks least of host memory takes "
        f"{format_bytes(there + lacking)} of the {format_bytes(there)} that a machine has ({config})",
        memory_limit_bytes=prepared.memory_limit_bytes,
        closest={"config": config.to_json(), "provenance": "predicted", "over_limit_bytes": lacking},
    )


def _check_any_fits(trials: list[Trial], prepared: Prepared, goal: Goal) -> None:
    """Raise with what failed, if trials failed otherwise than for memory and none has fitted.

    Where every one of them crashed it is the environment that lacks something, not memory.
    """
    failed = [t.outcome for t in trials if isinstance(t.outcome, Crashed | TimedOut | Diverged)]
    if not failed or any(isinstance(t.outcome, Fits) for t in trials):
        return
    last = failed[-1]
    said = (
        f"no trial has fitted, and {len(failed)} of {len(trials)} failed for another reason than memory, the last: "
        f"{last.kind.replace('_', ' ')}: {' '.join(last.reason.split())}"
    )
    if all(isinstance(t.outcome, Crashed) for t in trials):
        raise EnvironmentLacks(said, remedy="autofit doctor, and --fresh to try them again")
    limit, job = prepared.memory_limit_bytes, prepared.job
    closest = of_failures(trials, limit)
    if len(failed) < len(trials):
        said += f"; {closest.text}; {levers(goal, job.workload, job.hardware, beyond_bytes=closest.beyond_bytes)}"
    raise Shortfall(f"{said}; `autofit doctor` may say more", memory_limit_bytes=limit, closest=closest.document)
