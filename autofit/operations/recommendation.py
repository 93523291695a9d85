"""Answers from the store: the frontier, and the recommendation read off it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from shlex import quote

from autofit.catalog.hardware import card, matching_cards
from autofit.core.device.hardware import Hardware
from autofit.core.errors import NotMeasured, UsageError, unknown
from autofit.core.frontier import Frontier, Recommendation, alternatives, choose, point
from autofit.core.outcome import OutOfMemory, Trial, context_keys
from autofit.core.units import MIB, format_bytes
from autofit.core.verdict import in_words
from autofit.core.workload import METHODS, Goal, Workload
from autofit.planning.lattices import within
from autofit.planning.nothing_fits import Shortfall, how_all_failed, levers, lightest, of_failures
from autofit.planning.requests import WorkloadOptions, departures, memory_limit
from autofit.store import Store
from autofit.techniques import changes

WorkloadQuestion = WorkloadOptions | Workload
"""What a question is about: options that name a model, or a workload already in the store."""


def frontier(
    asked: WorkloadQuestion,
    *,
    hardware: str = "auto",
    goal: Goal | None = None,
    memory_limit_bytes: int | None = None,
    store: Store,
) -> Frontier:
    """The frontier of this workload on this hardware, for the most recently used stack under which anything fitted.

    With `memory_limit_bytes`, configs are judged as a search under that limit would judge them. Raises
    `NotMeasured`, naming the search to run, if nothing within the goal has been measured yet.
    """
    goal = goal or Goal()
    device = find_hardware(hardware, store, partial(search_command, asked, goal, memory_limit_bytes))
    found = _frontier(asked, device, goal, memory_limit_bytes, store)
    if not found.points:
        _tried_within(goal, asked, found, store)
    return found


def recommend(
    asked: WorkloadQuestion,
    *,
    hardware: str = "auto",
    memory_limit_bytes: int | None = None,
    goal: Goal | None = None,
    store: Store,
) -> Recommendation:
    """The fastest measured config of the most faithful method that fits.

    The limit defaults to the device's memory (on the CPU, a share of the host's), regardless of what other programs
    hold of it now, although a search leaves them their part. Raises `NothingFits` if nothing fits, and
    `NotMeasured`, naming the search to run, if nothing within the goal was tried.
    """
    _, answer = frontier_and_recommendation(
        asked, hardware=hardware, memory_limit_bytes=memory_limit_bytes, goal=goal, store=store
    )
    return answer()


def frontier_and_recommendation(
    asked: WorkloadQuestion,
    *,
    hardware: str = "auto",
    memory_limit_bytes: int | None = None,
    goal: Goal | None = None,
    store: Store,
) -> tuple[Frontier, Callable[[], Recommendation]]:
    """The frontier within the goal, which may be empty, and what recommends from the same points: it raises as
    `recommend` does. Raises `NotMeasured`."""
    goal = goal or Goal()
    device = find_hardware(hardware, store, partial(search_command, asked, goal, memory_limit_bytes))
    limit = memory_limit_bytes or memory_limit(None, device, asked.devices)
    # All methods: those outside the goal are listed as alternatives, or suggested if nothing within it fits.
    found = _frontier(asked, device, replace(goal, method="any"), limit, store)
    own = found.only(lambda config: config.text("method") in goal.methods)
    return own, lambda: recommendation(
        found, memory_limit_bytes=limit, goal=goal, tried=lambda: _tried_within(goal, asked, found, store)
    )


def recommendation(
    found: Frontier,
    *,
    memory_limit_bytes: int,
    goal: Goal,
    tried: Callable[[], Sequence[Trial]] = tuple,
) -> Recommendation:
    """The recommendation read off a frontier under a limit. Raises `NothingFits` if there is none.

    `tried` returns the trials within the goal, among which to find the one that came closest to fitting; it is called
    only if nothing has fitted at all.
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


def of_trial(trial: Trial, store: Store) -> Recommendation:
    """A trial's config as a recommendation under its own limit, without alternatives: what an export is made from.

    Raises `UsageError` for a trial that has not fitted.
    """
    own = point(trial)
    if own is None:
        raise UsageError(f"trial {trial.trial_id} has not fitted: there is nothing to recommend")
    found = store.frontier(**context_keys(trial.hardware, trial.stack, trial.workload))
    considered = () if found is None else found.considered
    # A point of the frontier knows whether other runs have verified it.
    known = next((p for p in considered if p.trial_id == trial.trial_id), own)
    return Recommendation(
        point=known,
        memory_limit_bytes=trial.memory_limit_bytes,
        headroom_bytes=trial.memory_limit_bytes - known.device_bytes,
        changes_training=changes(trial.config),
        alternatives=(),
        hardware=trial.hardware,
        workload=trial.workload,
        stack=trial.stack,
    )


def _frontier(asked: WorkloadQuestion, device: Hardware, goal: Goal, limit: int | None, store: Store) -> Frontier:
    workload = asked if isinstance(asked, Workload) else asked.resolve()[1]
    empty = None
    for stack in store.stacks(device.key, workload.key):
        found = store.frontier(**context_keys(device, stack, workload), memory_limit_bytes=limit)
        if found is not None:
            found = found.only(within(goal, (p.config for p in found.considered)))
            if found.points:
                return found
            empty = empty or found
    if empty is not None:
        return empty
    own = None if limit == memory_limit(None, device, asked.devices) else limit
    raise NotMeasured(
        f"{workload.model} with {' and '.join(_options_of(workload))} "
        f"has not been measured on {device.name} yet{_what_is(store, workload.model, device)}",
        remedy=f"run: {search_command(asked, memory_limit_bytes=own)}",
    )


def _tried_within(goal: Goal, asked: WorkloadQuestion, found: Frontier, store: Store) -> list[Trial]:
    """The trials of a frontier's hardware, workload and stack that are within the goal; raises `NotMeasured` if
    there are none."""
    every = store.trials(**context_keys(found.hardware, found.stack, found.workload))
    allowed = within(goal, (t.config for t in every))
    tried = [t for t in every if allowed(t.config)]
    if not tried:
        raise NotMeasured(
            f"none of the {found.trials} trials of {found.workload.model} on {found.hardware.name} is within --method "
            f"{goal.method} --min-rank {goal.min_rank} --allow {goal.allow.label}",
            remedy=f"run: {search_command(asked, goal)}",
        )
    return tried


def _shortfall(found: Frontier, limit: int, goal: Goal, tried: Callable[[], Sequence[Trial]]) -> Shortfall:
    """The error to raise: what came closest to the limit, and which options would help."""
    points = [p for p in found.points if p.method in goal.methods]
    trials = [] if points else tried()
    if points:
        closest = lightest(points[0], limit)
        how = closest.text
    else:
        closest = of_failures(trials, limit)
        how = f"{how_all_failed(trials)}, {closest.text}"
    of_memory = bool(points) or any(isinstance(t.outcome, OutOfMemory) for t in trials)
    said = [f"nothing that was measured fits {format_bytes(limit)}: {how}" if of_memory else how]
    other = choose(found.points, memory_limit_bytes=limit, methods=METHODS)
    if other is not None:
        memory, speed = other.measurement.device_bytes, other.measurement.tokens_per_second
        said.append(f"--method {other.method} would fit, with {format_bytes(memory)} at {speed:,.0f} tokens/s")
    if of_memory:
        said.append(levers(goal, found.workload, found.hardware, beyond_bytes=closest.beyond_bytes))
    else:
        said.append("none ran out of memory: `autofit doctor` may say more")
    if found.contradictory:
        said.append(in_words(found.contradictory))
    return Shortfall("; ".join(said), memory_limit_bytes=limit, closest=closest.document)


def find_hardware(name: str, store: Store, search: Callable[[], str] | None = None) -> Hardware:
    """Stored hardware by name, ignoring case. `auto` is this machine's or, if only one other is stored, that one.

    Raises `UsageError` for an unknown name, or one that may be several cards', and `NotMeasured` for a card that
    no trial has run on, naming the `search` that would answer, which is asked for only then.
    """
    stored = store.hardware()
    if name == "auto":
        from autofit.trial.machine.detection import detect

        here, _ = detect()
        if any(h.key == here.key for h in stored) or len(stored) != 1:
            return here
        return stored[0]
    exact = next((h for h in stored if h.name == name.lower()), None)
    if exact is not None:
        return exact
    meant = [known.name for known in matching_cards(name)]
    measured = [h for h in stored if h.name in meant]
    if len({h.name for h in measured}) == 1:
        return measured[0]
    if meant:
        found = card(name).name  # raises if the name may be several cards'
        there = "run a search there"
        if search is not None:
            there = f"run {search()} there, or here with --hardware {found} --dry-run for what is predicted"
        raise NotMeasured(f"nothing has been measured on {found} yet", remedy=there)
    raise unknown("hardware with measurements", name, [h.name for h in stored])


def _what_is(store: Store, model: str, device: Hardware) -> str:
    """What the store does have for this model, to append to the message that the question has no answer."""
    here = store.workloads(model=model, hardware_key=device.key)
    if here:
        rows = ", ".join(" ".join(_options_of(w)) for w in here[:5])
        return f" (measured: {rows})"
    elsewhere = [h.name for h in store.hardware() if h.key != device.key]
    return f" (--hardware with measurements of it: {', '.join(elsewhere[:5])})" if elsewhere else ""


def search_command(options: WorkloadQuestion, goal: Goal | None = None, memory_limit_bytes: int | None = None) -> str:
    """The search command whose trials would answer a question with these options."""
    goal, usual = goal or Goal(), Goal()
    words = [f"autofit search --model {quote(options.model)}", *(f"--{option}" for option in _options_of(options))]
    for name, value, default in (
        ("method", goal.method, usual.method),
        ("min-rank", goal.min_rank, usual.min_rank),
        ("allow", goal.allow.label, usual.allow.label),
    ):
        if value != default:
            words.append(f"--{name} {value}")
    if memory_limit_bytes is not None:
        words.append(f"--memory-limit {memory_limit_bytes / MIB:.12g}MiB")
    return " ".join(words)


def _options_of(asked: WorkloadQuestion) -> list[str]:
    """The workload options but the model, each as `name value`, without those that have their default."""
    said = departures(asked)
    if asked.lengths is not None:
        said["lengths"] = "YOUR_FILE"
    if asked.program is not None:
        said["program"] = quote(asked.program)
    spelled = {"trainer": "for", "program": "command"}
    return [f"{spelled.get(name, name).replace('_', '-')} {value}" for name, value in said.items()]
