"""The trials that decide a context's frontiers: an index tells which may, and `core` judges what they mean.

Configs that ran more than once show how much executions of one config differ, and so which speeds are ties.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, cast

from sqlalchemy import ColumnElement, Connection, Select, and_, bindparam, case, exists, func, select
from sqlalchemy.orm import aliased

from autofit.core.frontier import Frontier
from autofit.core.outcome import Fits, OutOfMemory, Trial
from autofit.core.repeatability import Execution
from autofit.store import contexts
from autofit.store.database.engine import ROWS_AT_ONCE
from autofit.store.rows import Reader
from autofit.store.tables import OF_CONFIG, OF_CONTEXT, TrialRow, WorkloadRow, table_of

Columns = Any
"""`TrialRow` or an alias of it."""
LATEST = 2000
"""Number of the hardware's latest trials that are examined: about those of the last hundred searches. How noisy a
machine is changes over time, and an answer must not wait for its whole history."""


def same_config(trial: Columns, other: Columns) -> ColumnElement[bool]:
    """The condition that two trials are of one config, hardware, stack and workload."""
    return and_(*(getattr(trial, name) == getattr(other, name) for name in OF_CONFIG))


def of_own_step(rows: Columns) -> ColumnElement[bool]:
    """The condition that a trial is of autofit's own step, and not of a user's program: those show of their hardware
    what else such a program does."""
    of_trial = WorkloadRow.key == rows.workload_key
    return exists().where(of_trial, WorkloadRow.body["program"].as_string().is_(None))


Row = tuple[int, float, int, str, int, str, bool, str]
"""What the index of contexts holds of a trial (`_INDEXED`). Its bytes and speed are None if it did not fit; those that
did sort by memory, speed and age. A plain tuple: the garbage collector leaves these alone, of which there are many."""
_INDEXED = (
    *("device_bytes", "tokens_per_second", "id", "config_key"),
    *("memory_limit_bytes", "outcome", "stopped_early", "family"),
)
_number, _config = itemgetter(2), itemgetter(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """What every frontier of a context is taken from, whatever its memory limit."""

    rows: Sequence[Row]
    """The trials of the configs that decide it."""
    attempts: Mapping[str, Sequence[Trial]]
    """The same by config, oldest first."""
    between: float
    """How much executions differ on the hardware."""
    about: Mapping[str, Any]
    """The fields of its frontiers that depend on none of these."""
    newest: int
    """The number of the context's newest trial."""
    set_asides: int
    """How often a trial of the context had been set aside."""

    def frontier(self, memory_limit_bytes: int) -> Frontier:
        """That under a limit; 0 stands for none."""
        return Frontier.judged(self.attempts.values(), memory_limit_bytes, self.between, **self.about)


def of_context(
    connection: Connection, reader: Reader, keys: Mapping[str, str], between: float, before: Ranking | None
) -> Ranking | None:
    """The ranking of a context, on whose hardware executions differ by `between`; None if it has no trials. Of one that
    was read `before`, what later trials do not concern is kept."""
    state = contexts.state(connection, keys)
    if state is None:
        return None
    trials, out_of_memory = connection.execute(_COUNTS, keys).one()
    kept = before if before is not None and before.set_asides == state.set_asides else None
    rows, attempts = _read_since(connection, keys, kept, trials)
    deciding = _deciding(rows, attempts)
    while missing := deciding - attempts.keys():
        read = _read_attempts(connection, reader, rows, missing)
        attempts |= read
        if any(trial.why_set_aside for trials in read.values() for trial in trials):
            deciding = _deciding(rows, attempts)
    return Ranking(
        rows=[row for row in rows if _config(row) in deciding],
        attempts={config: attempts[config] for config in deciding},
        between=between,
        about={
            "hardware": reader.hardware(connection, state.hardware_digest),
            "workload": reader.workload(connection, keys["workload_key"]),
            "stack": reader.stack(connection, keys["stack_key"], state.driver),
            "trials": trials,
            "out_of_memory": out_of_memory,
        },
        newest=state.id,
        set_asides=state.set_asides,
    )


def contradicting(connection: Connection, reader: Reader) -> Iterator[Sequence[Trial]]:
    """The attempts of each config of the store that has run out of memory and has fitted in no more: they contradict
    each other, unless later ones have settled it."""
    for context, _ in sorted(contexts.versions(connection)):
        rows = _read_rows(connection, _ROWS, dict(zip(OF_CONTEXT, context, strict=True)))
        yield from _read_attempts(connection, reader, rows, _both_ways(rows)).values()


def _read_since(
    connection: Connection, keys: Mapping[str, str], before: Ranking | None, trials: int
) -> tuple[list[Row], dict[str, Sequence[Trial]]]:
    """The rows of a context among which are those that decide it, now that it has so many trials, and the attempts of
    those configs that are known from `before`."""
    if before is None:
        return _read_rows(connection, _ROWS, keys), {}
    added = connection.scalars(_ADDED, {**keys, "after": before.newest}).all()
    # Another number says that one was committed after one of a higher number.
    if before.about["trials"] + len(added) != trials or len(added) > ROWS_AT_ONCE:
        return _read_rows(connection, _ROWS, keys), {}
    configs = set(added)
    attempts = {config: trials for config, trials in before.attempts.items() if config not in configs}
    if any(len(before.attempts.get(config, ())) == 1 for config in configs):  # what it alone has hidden may come back
        return _read_rows(connection, _ROWS, keys), attempts
    rows = [row for row in before.rows if _config(row) not in configs]
    return rows + _read_rows(connection, _ROWS_OF_CONFIGS, {**keys, "configs": list(configs)}), attempts


def _deciding(rows: Iterable[Row], attempts: Mapping[str, Sequence[Trial]]) -> set[str]:
    """The configs on which a context's frontiers depend: those that contradict themselves, and those that are faster
    than all of their kind that take less memory.

    A config that was tried once hides what is worse, because it is known by the same trial under every limit: unless
    its attempts say that this one is set aside. Kinds have separate frontiers: those of a family, because a user may
    allow no other, and of what was stopped early, which gives way to what was timed in full.
    """
    runs = Counter(map(_config, rows))
    kinds = defaultdict[tuple[bool, str], list[Row]](list)
    for row in rows:
        _, _, _, _, _, outcome, stopped_early, family = row
        if outcome == Fits.kind:
            kinds[stopped_early, family].append(row)
    deciding = _both_ways(rows)
    for fits in kinds.values():
        fastest = -1.0
        for _, speed, _, config, *_ in sorted(fits):
            if speed > fastest:
                deciding.add(config)
                if runs[config] == 1 and not any(trial.why_set_aside for trial in attempts.get(config, ())):
                    fastest = speed
    return deciding


def _both_ways(rows: Iterable[Row]) -> set[str]:
    """The configs that have run out of memory and have fitted in no more."""
    ran_out: dict[str, int] = {}
    for _, _, _, config, limit, outcome, _, _ in rows:
        if outcome == OutOfMemory.kind:
            ran_out[config] = max(limit, ran_out.get(config, 0))
    fits = (row for row in rows if _config(row) in ran_out and row[5] == Fits.kind)
    return {config for size, _, _, config, *_ in fits if size <= ran_out[config]}


def _read_rows(connection: Connection, query: Select[*tuple[Any, ...]], values: Mapping[str, Any]) -> list[Row]:
    return [cast(Row, tuple(row)) for row in connection.execute(query, values)]


def _read_attempts(
    connection: Connection, reader: Reader, rows: Iterable[Row], configs: Collection[str]
) -> dict[str, Sequence[Trial]]:
    """All attempts of these configs, oldest first."""
    numbers = list({_config(row): _number(row) for row in rows if _config(row) in configs}.values())
    attempts: dict[str, list[Trial]] = defaultdict(list)
    for start in range(0, len(numbers), ROWS_AT_ONCE):
        chosen = connection.execute(_ATTEMPTS, {"numbers": numbers[start : start + ROWS_AT_ONCE]}).all()
        # Sorted here: to have the order from an index, SQLite would walk that of the context.
        for row in sorted(chosen, key=attrgetter("id")):
            attempts[row.config_key].append(reader.trial(connection, row))
    return dict(attempts)


def repeated_executions(connection: Connection, hardware_key: str) -> list[list[Execution]]:
    """The executions of each config and workload that was recently timed in full more than once under one stack.

    Trials of a single timed step are left out: they have no spread of their own that could be subtracted. So are those
    that others disturbed, and those of users' programs: they do not show how much executions differ by themselves.
    """
    executions: defaultdict[tuple[str, str, str], list[Execution]] = defaultdict(list)
    for stack, workload, key, speed, width in connection.execute(_REPEATED, {"hardware_key": hardware_key}):
        if width is not None and speed:
            executions[stack, workload, key].append((speed, width))
    return list(executions.values())


# Statements are built once, because that takes longer than running them.


def _attempts() -> Select[*tuple[Any, ...]]:
    one = aliased(TrialRow, name="one")
    query = select(TrialRow).join_from(one, TrialRow, same_config(TrialRow, one))
    return query.where(one.id.in_(bindparam("numbers", expanding=True)))


def _undisturbed(rows: Columns) -> ColumnElement[bool]:
    """The condition that a trial fitted, was timed in full and not disturbed by others."""
    return and_(rows.outcome == Fits.kind, ~rows.stopped_early, ~rows.suspect)


def _repeated() -> Select[*tuple[Any, ...]]:
    latest = (
        select(
            *(getattr(TrialRow, name) for name in OF_CONFIG), TrialRow.outcome, TrialRow.stopped_early, TrialRow.suspect
        )
        .where(TrialRow.hardware_key == bindparam("hardware_key"), of_own_step(TrialRow))
        .order_by(TrialRow.id.desc())
        .limit(LATEST)
        .subquery()
    )
    keys = [latest.c[name] for name in OF_CONFIG]
    repeated = select(*keys).where(_undisturbed(latest.c)).group_by(*keys).having(func.count() > 1).subquery()
    run = aliased(TrialRow, name="run")
    spread = run.evidence[("measurement", "step_seconds", "relative_spread")].as_float()
    return (
        select(run.stack_key, run.workload_key, run.config_key, run.tokens_per_second, spread)
        .join_from(repeated, run, same_config(run, repeated.c))
        .where(_undisturbed(run))
        .order_by(run.id)
    )


_TRIALS = table_of(TrialRow).c
_OF_CONTEXT = tuple(_TRIALS[name] == bindparam(name) for name in OF_CONTEXT)
_ROWS = select(*(_TRIALS[name] for name in _INDEXED)).where(*_OF_CONTEXT)
_ROWS_OF_CONFIGS = _ROWS.where(_TRIALS.config_key.in_(bindparam("configs", expanding=True)))
_ADDED = select(_TRIALS.config_key).where(*_OF_CONTEXT, _TRIALS.id > bindparam("after"))
_COUNTS = select(
    func.count(), func.coalesce(func.sum(case((_TRIALS.outcome == OutOfMemory.kind, 1), else_=0)), 0)
).where(*_OF_CONTEXT)
_ATTEMPTS = _attempts()
_REPEATED = _repeated()
