"""Answers from the store: the frontier, and the recommendation that is read off it."""

from __future__ import annotations

from dataclasses import replace

from autofit.catalog.hardware import cards
from autofit.errors import EnvironmentLacks, unknown
from autofit.frontier import Frontier, Recommendation, alternatives, choose
from autofit.hardware import Hardware
from autofit.operations.lattices import within
from autofit.operations.requests import WorkloadOptions, memory_limit
from autofit.operations.shortfall import Shortfall, closest_point
from autofit.store import Store
from autofit.techniques import changes
from autofit.units import format_bytes
from autofit.workload import METHODS, Effect, Goal, Workload

Asked = WorkloadOptions | Workload
"""What is asked about: options that name a model, or a workload that a store has."""


def frontier(
    asked: Asked,
    *,
    hardware: str = "auto",
    goal: Goal | None = None,
    memory_limit_bytes: int | None = None,
    store: Store,
) -> Frontier:
    """The frontier of the newest stack that has measured this workload on this hardware.

    With `memory_limit_bytes`, configs are judged as a search under that limit judges them. Raises `EnvironmentLacks`
    if nothing is measured yet, naming the search that would.
    """
    device = find_hardware(hardware, store)
    return _frontier(asked, device, goal or Goal(), memory_limit_bytes, store)


def recommend(
    asked: Asked,
    *,
    hardware: str = "auto",
    memory_limit_bytes: int | None = None,
    goal: Goal | None = None,
    store: Store,
) -> Recommendation:
    """The fastest measured config of the most faithful method that fits. Raises `NothingFits` if none does.

    The limit is the one that a search here would take, unless one is given.
    """
    goal = goal or Goal()
    device = find_hardware(hardware, store)
    limit = memory_limit_bytes or memory_limit(None, device)
    # All methods, so that what other methods give can stand beside the answer, or take its place.
    found = _frontier(asked, device, replace(goal, method="any"), limit, store)
    return recommendation(found, memory_limit_bytes=limit, goal=goal)


def recommendation(found: Frontier, *, memory_limit_bytes: int, goal: Goal) -> Recommendation:
    """The recommendation that a frontier gives under a limit. Raises `NothingFits` if it has none."""
    points = [p for p in found.points if p.method in goal.methods]
    chosen = choose(
        found.considered,
        memory_limit_bytes=memory_limit_bytes,
        methods=goal.methods,
        changes=lambda config: len(changes(config)),
    )
    if chosen is None:
        raise Shortfall(
            _closest(found, memory_limit_bytes, goal),
            memory_limit_bytes=memory_limit_bytes,
            closest=closest_point(points[0], memory_limit_bytes) if points else None,
        )
    return Recommendation(
        point=chosen,
        memory_limit_bytes=memory_limit_bytes,
        headroom_bytes=memory_limit_bytes - chosen.measurement.device_bytes,
        changes_training=changes(chosen.config),
        alternatives=alternatives(chosen, found.points, memory_limit_bytes=memory_limit_bytes),
        hardware=found.hardware,
        workload=found.workload,
        stack=found.stack,
    )


def _frontier(asked: Asked, device: Hardware, goal: Goal, limit: int | None, store: Store) -> Frontier:
    workload = asked if isinstance(asked, Workload) else asked.resolve()[1]
    for stack in store.stacks(device.key, workload.key):
        found = store.frontier(
            hardware_key=device.key,
            stack_key=stack.key,
            workload_key=workload.key,
            memory_limit_bytes=limit,
            allowed=lambda config: within(config, goal),
        )
        if found is not None:
            return found
    raise EnvironmentLacks(
        f"{workload.model} with seq-len {workload.seq_len} and global-batch {workload.global_batch} "
        f"is not measured on {device.name} yet{_what_is(store, workload.model, device)}",
        remedy=f"run: {search_command(asked)}",
    )


def _closest(found: Frontier, limit: int, goal: Goal) -> str:
    """What came closest to the limit, and which lever would help."""
    points = [p for p in found.points if p.method in goal.methods]
    said = f"nothing that was measured fits {format_bytes(limit)}: "
    if points:
        lightest = points[0]
        said += f"the closest takes {format_bytes(lightest.measurement.device_bytes)} ({lightest.config})"
    elif found.trials and found.trials == found.out_of_memory:
        said += "every trial ran out of memory"
    else:
        said += f"of {found.trials} trials none within --method {goal.method} --min-rank {goal.min_rank} has fitted"
    other = choose(found.points, memory_limit_bytes=limit, methods=METHODS)
    if other is not None:
        memory, speed = other.measurement.device_bytes, other.measurement.tokens_per_second
        said += f"; --method {other.method} would fit, with {format_bytes(memory)} at {speed:,.0f} tokens/s"
    elif "qlora" not in goal.methods:
        said += "; --method any would also try lighter methods"
    elif goal.allow < Effect.TRAINING:
        said += "; --allow training would also try lighter optimizers and targets"
    return said


def find_hardware(name: str, store: Store) -> Hardware:
    """Stored hardware by name, in any case; `auto` is this machine's, or the only one stored.

    Raises `UsageError` for a name that does not exist, `EnvironmentLacks` for a card that no trial has run on.
    """
    stored = store.hardware()
    if name == "auto":
        from autofit.trial.site import detect

        here, _ = detect()
        if any(h.key == here.key for h in stored) or len(stored) != 1:
            return here
        return stored[0]
    for hardware in stored:
        if hardware.name == name.lower():
            return hardware
    if any(known.name == name.lower() for known in cards()):
        raise EnvironmentLacks(f"what is asked is not measured on {name.lower()} yet", remedy="run the search there")
    raise unknown("hardware with measurements", name, [h.name for h in stored])


def _what_is(store: Store, model: str, device: Hardware) -> str:
    """What the store has of this model, for a question that misses it."""
    here = store.workloads(model=model, hardware_key=device.key)
    if here:
        rows = ", ".join(f"seq-len {w.seq_len} global-batch {w.global_batch}" for w in here[:5])
        return f" (measured: {rows})"
    elsewhere = [h.name for h in store.hardware() if h.key != device.key]
    return f" (--hardware names another that is: {', '.join(elsewhere[:5])})" if elsewhere else ""


def search_command(options: Asked) -> str:
    """The command whose trials would answer for these options."""
    words = [
        f"autofit search --model {options.model} --seq-len {options.seq_len} --global-batch {options.global_batch}"
    ]
    for name, value, usual in (
        ("lora-dropout", options.lora_dropout, 0.0),
        ("devices", options.devices, 1),
        ("seed", options.seed, 0),
    ):
        if value != usual:
            words.append(f"--{name} {value}")
    return " ".join(words)
