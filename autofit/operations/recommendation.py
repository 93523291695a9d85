"""Answers from the store: the frontier, and the recommendation read off it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from shlex import quote

from autofit.catalog.hardware import card, card_of, matching_cards
from autofit.core.device.hardware import Hardware
from autofit.core.errors import NotMeasured, Shortfall, UsageError, unknown
from autofit.core.frontier import Frontier, Recommendation, alternatives, choose, point
from autofit.core.outcome import OutOfMemory, Trial, context_keys
from autofit.core.units import MIB, format_bytes
from autofit.core.verdict import in_words
from autofit.core.workload import METHODS, Goal, Workload
from autofit.planning.lattices import within
from autofit.planning.nothing_fits import how_all_failed, levers, lightest, of_failures
from autofit.planning.requests import WorkloadOptions, departures, memory_limit
from autofit.store import Store
from autofit.techniques import changes

WorkloadQuestion = WorkloadOptions | Workload
"""What a question is about: options that name a model, or a workload already in the store."""


class StoredAnswer:
    """What the store answers to one question: a frontier, and the recommendation read off the same points."""

    def __init__(
        self,
        question: WorkloadQuestion,
        *,
        hardware: str = "auto",
        memory_limit_bytes: int | None = None,
        goal: Goal | None = None,
        store: Store,
    ) -> None:
        """The limit defaults to the device's memory (on the CPU, a share of the host's), whatever other programs hold
        of it now. Raises `NotMeasured`, and `UsageError` for one above the device's memory."""
        self._question, self._goal, self._store = question, goal or Goal(), store
        device = find_hardware(hardware, store, partial(search_command, question, self._goal, memory_limit_bytes))
        self._limit = memory_limit(memory_limit_bytes, device, question.devices)
        # Methods outside the goal are listed as alternatives, or suggested if nothing within it fits.
        self._all_methods = _frontier(question, device, self._goal, self._limit, store)
        self.frontier = _of_methods(self._goal, self._all_methods)
        """Within the goal; it may be empty."""

    def recommendation(self) -> Recommendation:
        """Raises as `recommend` does."""
        found = read_off(self._all_methods, memory_limit_bytes=self._limit, goal=self._goal)
        if found is not None:
            return found
        tried = (
            [] if self.frontier.points else _tried_within(self._goal, self._question, self._all_methods, self._store)
        )
        raise shortfall(self._all_methods, self._limit, self._goal, tried)


def frontier(
    question: WorkloadQuestion,
    *,
    hardware: str = "auto",
    goal: Goal | None = None,
    memory_limit_bytes: int | None = None,
    store: Store,
) -> Frontier:
    """The frontier of this workload on this hardware, under the newest stack for which one of the goal's methods fits.

    With `memory_limit_bytes`, configs are judged as by a search under that limit. Raises `NotMeasured`, naming the
    search to run, if nothing within the goal was measured, and `UsageError` for a limit above the device's memory.
    """
    goal = goal or Goal()
    device = find_hardware(hardware, store, partial(search_command, question, goal, memory_limit_bytes))
    memory_limit(memory_limit_bytes, device, question.devices)  # raises
    measured = _of_methods(goal, _frontier(question, device, goal, memory_limit_bytes, store))
    if not measured.points:
        _tried_within(goal, question, measured, store)
    return measured


def recommend(
    question: WorkloadQuestion,
    *,
    hardware: str = "auto",
    memory_limit_bytes: int | None = None,
    goal: Goal | None = None,
    store: Store,
) -> Recommendation:
    """The fastest measured config of the most faithful method that fits, by the limit of `StoredAnswer`. Raises
    `NothingFits`, `NotMeasured`, naming the search to run, and `UsageError` for a limit above the device's memory."""
    answer = StoredAnswer(question, hardware=hardware, memory_limit_bytes=memory_limit_bytes, goal=goal, store=store)
    return answer.recommendation()


def read_off(measured: Frontier, *, memory_limit_bytes: int, goal: Goal) -> Recommendation | None:
    """The recommendation read off a frontier under a limit; None if nothing within the goal fits."""
    chosen = choose(
        measured.considered,
        memory_limit_bytes=memory_limit_bytes,
        methods=goal.methods,
        changes=lambda config: len(changes(config, goal)),
    )
    if chosen is None:
        return None
    return Recommendation(
        point=chosen,
        memory_limit_bytes=memory_limit_bytes,
        headroom_bytes=memory_limit_bytes - chosen.measurement.device_bytes,
        changes_training=changes(chosen.config, goal),
        alternatives=alternatives(chosen, measured.points, memory_limit_bytes=memory_limit_bytes),
        hardware=measured.hardware,
        workload=measured.workload,
        stack=measured.stack,
        contradictory=measured.contradictory,
    )


def of_trial(trial: Trial, store: Store) -> Recommendation:
    """A trial's config as a recommendation, to be exported. Raises `UsageError` for one that has not fitted."""
    measured_point = point(trial)
    if measured_point is None:
        raise UsageError(f"trial {trial.trial_id} has not fitted: there is nothing to recommend")
    measured = store.frontier(**context_keys(trial.hardware, trial.stack, trial.workload))
    considered = () if measured is None else measured.considered
    # A point of the frontier knows whether other runs have verified it.
    stored_point = next((p for p in considered if p.trial_id == trial.trial_id), measured_point)
    return Recommendation(
        point=stored_point,
        memory_limit_bytes=trial.memory_limit_bytes,
        headroom_bytes=trial.memory_limit_bytes - stored_point.device_bytes,
        changes_training=changes(trial.config),
        alternatives=(),
        hardware=trial.hardware,
        workload=trial.workload,
        stack=trial.stack,
    )


def _of_methods(goal: Goal, measured: Frontier) -> Frontier:
    return measured.only(lambda config: config.text("method") in goal.methods)


def _frontier(question: WorkloadQuestion, device: Hardware, goal: Goal, limit: int | None, store: Store) -> Frontier:
    """Of all methods within the rest of the goal, under the newest stack for which one of the goal's fits."""
    workload = question if isinstance(question, Workload) else question.resolve()[1]
    any_method, newest = replace(goal, method="any"), None
    for stack in store.stacks(device.key, workload.key):
        measured = store.frontier(**context_keys(device, stack, workload), memory_limit_bytes=limit)
        if measured is not None:
            measured = measured.only(within(any_method, (p.config for p in measured.considered)))
            if _of_methods(goal, measured).points:
                return measured
            newest = newest or measured
    if newest is not None:
        return newest
    limit_option = None if limit == memory_limit(None, device, question.devices) else limit
    raise NotMeasured(
        f"{workload.model} with {' and '.join(_options_of(workload))} "
        f"has not been measured on {device.name} yet{_measured_instead(store, workload.model, device)}",
        remedy=f"run: {search_command(question, memory_limit_bytes=limit_option)}",
    )


def _tried_within(goal: Goal, question: WorkloadQuestion, measured: Frontier, store: Store) -> list[Trial]:
    """The trials of a frontier's context that are within the goal; raises `NotMeasured` if there are none."""
    keys = context_keys(measured.hardware, measured.stack, measured.workload)
    trials = store.trials(**keys)
    allowed = within(goal, [t.config for t in trials])
    tried = [t for t in trials if allowed(t.config)]
    if not tried:
        raise NotMeasured(
            f"none of the {measured.trials} trials of {measured.workload.model} on {measured.hardware.name} is within "
            f"--method {goal.method} --min-rank {goal.min_rank} --allow {goal.allow.label}",
            remedy=f"run: {search_command(question, goal)}",
        )
    return tried


def shortfall(measured: Frontier, limit: int, goal: Goal, trials: Sequence[Trial]) -> Shortfall:
    """The error where nothing fits: what came closest, and what would help. `trials` are those within the goal."""
    points = [p for p in measured.points if p.method in goal.methods]
    if points:
        closest = lightest(points[0], limit)
        how = closest.text
    else:
        closest = of_failures(trials, limit)
        how = f"{how_all_failed(trials)}, {closest.text}"
    of_memory = bool(points) or any(isinstance(t.outcome, OutOfMemory) for t in trials)
    clauses = [f"nothing that was measured fits {format_bytes(limit)}: {how}" if of_memory else how]
    other = choose(measured.points, memory_limit_bytes=limit, methods=METHODS)
    if other is not None:
        memory, speed = other.measurement.device_bytes, other.measurement.tokens_per_second
        clauses.append(f"--method {other.method} would fit, with {format_bytes(memory)} at {speed:,.0f} tokens/s")
    if of_memory:
        clauses.append(levers(goal, measured.workload, measured.hardware, beyond_bytes=closest.beyond_bytes))
    else:
        clauses.append("none ran out of memory: `autofit doctor` may say more")
    if measured.contradictory:
        clauses.append(in_words(measured.contradictory))
    return Shortfall("; ".join(clauses), memory_limit_bytes=limit, closest=closest.document)


def find_hardware(name: str, store: Store, search: Callable[[], str] | None = None) -> Hardware:
    """Stored hardware by name, ignoring case. `auto` is this machine's or, if only one real one is stored, that one.

    Raises `UsageError` for an unknown or ambiguous name, and `NotMeasured`, naming the command that `search` returns.
    """
    stored = store.hardware()
    if name == "auto":
        from autofit.trial.machine.detection import detect

        this_machine, _ = detect()
        real = [h for h in stored if not h.is_emulated]
        if any(h.key == this_machine.key for h in stored) or len(real) != 1:
            return this_machine
        return real[0]
    exact = next((h for h in stored if h.name == name.lower()), None)
    if exact is not None:
        return exact
    card_names = [c.name for c in matching_cards(name)]
    # With another power limit it is the same card; an emulated one never stands for it.
    cards = {h: card_of(h.name) for h in stored if not h.is_emulated}
    measured = [h for h, known in cards.items() if known is not None and known.name in card_names]
    by_name = {h.name: h for h in reversed(measured)}
    if len(card_names) == 1 and card_names[0] in by_name:
        return by_name[card_names[0]]  # the card as it comes
    if len(by_name) == 1:
        return measured[0]
    if by_name:
        raise UsageError(f"{name} was measured as {', '.join(sorted(by_name))}: name one of them")
    if card_names:
        card_name = card(name).name  # raises if the name may be several cards'
        remedy = "run a search there"
        if search is not None:
            remedy = f"run {search()} there, or here with --hardware {card_name} --dry-run for what is predicted"
        raise NotMeasured(f"nothing has been measured on {card_name} yet", remedy=remedy)
    raise unknown("hardware with measurements", name, [h.name for h in stored])


def _measured_instead(store: Store, model: str, device: Hardware) -> str:
    """What the store has for this model, to append to the message that the question has no answer."""
    workloads = store.workloads(model=model, hardware_key=device.key)
    if workloads:
        options = ", ".join(" ".join(_options_of(w)) for w in workloads[:5])
        return f" (measured: {options})"
    other_hardware = [h.name for h in store.hardware() if h.key != device.key]
    return f" (--hardware with measurements of it: {', '.join(other_hardware[:5])})" if other_hardware else ""


def search_command(options: WorkloadQuestion, goal: Goal | None = None, memory_limit_bytes: int | None = None) -> str:
    """The search command whose trials would answer a question with these options."""
    goal, defaults = goal or Goal(), Goal()
    parts = [f"autofit search --model {quote(options.model)}", *(f"--{option}" for option in _options_of(options))]
    for name, value, default in (
        ("method", goal.method, defaults.method),
        ("min-rank", goal.min_rank, defaults.min_rank),
        ("allow", goal.allow.label, defaults.allow.label),
    ):
        if value != default:
            parts.append(f"--{name} {value}")
    if memory_limit_bytes is not None:
        parts.append(f"--memory-limit {memory_limit_bytes / MIB:.12g}MiB")
    return " ".join(parts)


def _options_of(question: WorkloadQuestion) -> list[str]:
    """The workload options other than the model, each as `name value`, without those that have their default."""
    values = departures(question)
    if question.lengths is not None:
        values["lengths"] = "YOUR_FILE"
    if question.program is not None:
        values["program"] = quote(question.program)
    option_names = {"trainer": "for", "program": "command"}
    return [f"{option_names.get(name, name).replace('_', '-')} {value}" for name, value in values.items()]
