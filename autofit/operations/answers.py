"""Answers from the store: the frontier, and the recommendation that is read off it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from shlex import quote

from autofit.catalog.hardware import cards
from autofit.contradiction import in_words
from autofit.errors import EnvironmentLacks, unknown
from autofit.frontier import Frontier, Recommendation, alternatives, choose
from autofit.hardware import Hardware
from autofit.operations.lattices import within
from autofit.operations.requests import WorkloadOptions, memory_limit
from autofit.operations.shortfall import Shortfall, how_all_failed, levers, lightest, of_failures
from autofit.outcome import Trial
from autofit.store import Store
from autofit.techniques import changes
from autofit.units import format_bytes
from autofit.workload import METHODS, Goal, Workload

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
    """The fastest measured config of the most faithful method that fits.

    Without a limit it is the device's memory (of a host a share), whatever other programs hold of it now: a search
    leaves them theirs. Raises `NothingFits` if nothing fits, `EnvironmentLacks` if nothing within the goal was tried,
    naming the search that would.
    """
    goal = goal or Goal()
    device = find_hardware(hardware, store)
    limit = memory_limit_bytes or memory_limit(None, device, asked.devices)
    # All methods, so that what other methods give can stand beside the answer, or take its place.
    found = _frontier(asked, device, replace(goal, method="any"), limit, store)
    return recommendation(
        found, memory_limit_bytes=limit, goal=goal, tried=lambda: _tried_within(goal, asked, found, store)
    )


def recommendation(
    found: Frontier,
    *,
    memory_limit_bytes: int,
    goal: Goal,
    tried: Callable[[], Sequence[Trial]] = tuple,
) -> Recommendation:
    """The recommendation that a frontier gives under a limit. Raises `NothingFits` if it has none.

    `tried` gives the trials within the goal, for what came closest; it is asked only if nothing has fitted at all.
    """
    chosen = choose(
        found.considered,
        memory_limit_bytes=memory_limit_bytes,
        methods=goal.methods,
        changes=lambda config: len(changes(config, goal)),
    )
    if chosen is None:
        raise _shortfall(found, memory_limit_bytes, goal, tried)
    return Recommendation(
        point=chosen,
        memory_limit_bytes=memory_limit_bytes,
        headroom_bytes=memory_limit_bytes - chosen.measurement.device_bytes,
        changes_training=changes(chosen.config, goal),
        alternatives=alternatives(chosen, found.points, memory_limit_bytes=memory_limit_bytes),
        hardware=found.hardware,
        workload=found.workload,
        stack=found.stack,
        contradictory=found.contradictory,
    )


def _frontier(asked: Asked, device: Hardware, goal: Goal, limit: int | None, store: Store) -> Frontier:
    workload = asked if isinstance(asked, Workload) else asked.resolve()[1]
    for stack in store.stacks(device.key, workload.key):
        found = store.frontier(
            hardware_key=device.key, stack_key=stack.key, workload_key=workload.key, memory_limit_bytes=limit
        )
        if found is not None:
            return found.only(within(goal, (p.config for p in found.considered)))
    raise EnvironmentLacks(
        f"{workload.model} with seq-len {workload.seq_len} and global-batch {workload.global_batch} "
        f"is not measured on {device.name} yet{_what_is(store, workload.model, device)}",
        remedy=f"run: {search_command(asked)}",
    )


def _tried_within(goal: Goal, asked: Asked, found: Frontier, store: Store) -> list[Trial]:
    """The trials of a frontier's hardware, workload and stack that are within the goal; raises `EnvironmentLacks` if
    there are none."""
    every = store.trials(hardware_key=found.hardware.key, stack_key=found.stack.key, workload_key=found.workload.key)
    allowed = within(goal, (t.config for t in every))
    tried = [t for t in every if allowed(t.config)]
    if not tried:
        raise EnvironmentLacks(
            f"none of the {found.trials} trials of {found.workload.model} on {found.hardware.name} is within --method "
            f"{goal.method} --min-rank {goal.min_rank} --allow {goal.allow.label}",
            remedy=f"run: {search_command(asked, goal)}",
        )
    return tried


def _shortfall(found: Frontier, limit: int, goal: Goal, tried: Callable[[], Sequence[Trial]]) -> Shortfall:
    """What came closest to the limit, and which levers would help."""
    points = [p for p in found.points if p.method in goal.methods]
    if points:
        closest = lightest(points[0], limit)
        how = closest.text
    else:
        trials = tried()
        closest = of_failures(trials, limit)
        how = f"{how_all_failed(trials)}, {closest.text}"
    said = [f"nothing that was measured fits {format_bytes(limit)}: {how}"]
    other = choose(found.points, memory_limit_bytes=limit, methods=METHODS)
    if other is not None:
        memory, speed = other.measurement.device_bytes, other.measurement.tokens_per_second
        said.append(f"--method {other.method} would fit, with {format_bytes(memory)} at {speed:,.0f} tokens/s")
    said.append(levers(goal, found.workload, found.hardware, beyond_bytes=closest.beyond_bytes))
    if found.contradictory:
        said.append(in_words(found.contradictory))
    return Shortfall("; ".join(said), memory_limit_bytes=limit, closest=closest.document)


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


def search_command(options: Asked, goal: Goal | None = None) -> str:
    """The command whose trials would answer for these options."""
    goal, usual = goal or Goal(), Goal()
    words = [
        f"autofit search --model {quote(options.model)}",
        f"--seq-len {options.seq_len} --global-batch {options.global_batch}",
    ]
    for name, value, default in (
        ("lora-dropout", options.lora_dropout, 0.0),
        ("devices", options.devices, 1),
        ("seed", options.seed, 0),
        ("method", goal.method, usual.method),
        ("min-rank", goal.min_rank, usual.min_rank),
        ("allow", goal.allow.label, usual.allow.label),
    ):
        if value != default:
            words.append(f"--{name} {value}")
    return " ".join(words)
