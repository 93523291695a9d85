"""The trials that a frontier needs: the database selects them, `core` judges what they mean together.

Configs that ran more than once show how much executions of one config differ, and so which speeds are ties.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, bindparam, case, exists, func, select, tuple_
from sqlalchemy.orm import aliased

from autofit.core.frontier import Point, point
from autofit.core.outcome import Fits, OutOfMemory, Trial
from autofit.core.repeatability import Execution
from autofit.core.verdict import standing
from autofit.store.rows import Reader
from autofit.store.tables import OF_CONFIG, OF_CONTEXT, TrialRow

Columns = Any
"""`TrialRow` or an alias of it."""
_CONFIG = tuple(getattr(TrialRow, name) for name in OF_CONFIG)
LATEST = 2000
"""Number of the hardware's latest trials that are examined: about those of the last hundred searches. How noisy a
machine is changes over time, and an answer must not wait for its whole history."""


def same_config(trial: Columns, other: Columns) -> ColumnElement[bool]:
    """The condition that two trials are of one config, hardware, stack and workload."""
    return and_(*(getattr(trial, name) == getattr(other, name) for name in OF_CONFIG))


def only_of_config(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """`condition` on the trials of one config, wrapped in a CASE so that the database finds the config's few rows by
    their key instead of using the index of all trials with one outcome."""
    return case((condition, 1), else_=0) == 1


def counts(connection: Connection, keys: Mapping[str, str]) -> tuple[int, int]:
    """How many trials of a context there are, and how many of them ran out of memory."""
    numbers = [connection.scalar(query, keys) or 0 for query in (_EVERY, _OUT_OF_MEMORY)]
    return numbers[0], numbers[1]


def undominated(
    connection: Connection, reader: Reader, keys: Mapping[str, str], memory_limit_bytes: int, between: float
) -> Iterator[Point]:
    """The frontiers of the families: at least those points that `Frontier.of` would keep, whichever families it is
    given. Trials timed in full and trials stopped early have separate frontiers, so that none of the latter hides one
    of the former.

    Each config is known by one trial (`core.verdict.standing`). An index holds every family's trials in the order of
    memory, then speed: from each point the database finds the next trial that is faster, and reads no other config's.
    """
    for stopped_early, family in connection.execute(_FAMILIES, keys).all():
        parameters: dict[str, Any] = {**keys, "stopped_early": stopped_early, "family": family, **_START}
        while rows := connection.execute(_NEXT_CONFIG, parameters).all():
            attempts = [reader.trial(connection, row) for row in rows]
            parameters |= {"bytes": rows[0].bytes, "speed": rows[0].speed, "number": rows[0].number}
            standing_trial = standing(attempts, memory_limit_bytes)
            if standing_trial is None or standing_trial.trial_id != parameters["number"]:
                continue
            parameters["fastest"] = parameters["speed"]
            candidate = point(standing_trial, sum(t.timed_in_full for t in attempts), between)
            assert candidate is not None
            yield candidate


def both_ways(connection: Connection, reader: Reader, keys: Mapping[str, str] | None = None) -> Iterator[list[Trial]]:
    """The attempts of each config that has fitted and has run out of memory, which may contradict each other: of one
    context, or of all."""
    rows = connection.execute(_BOTH_WAYS if keys is None else _BOTH_WAYS_OF_CONTEXT, keys or {})
    for _, attempts in groupby(rows, lambda row: row[-len(_CONFIG) :]):
        yield [reader.trial(connection, row) for row in attempts]


def repeated_executions(connection: Connection, hardware_key: str) -> list[list[Execution]]:
    """The executions of each config and workload that was recently timed in full more than once under one stack.

    Trials of a single timed step are left out: they have no spread of their own that could be subtracted. So are those
    that others disturbed: they do not show how much executions differ by themselves.
    """
    executions: defaultdict[tuple[str, str, str], list[Execution]] = defaultdict(list)
    for stack, workload, key, speed, width in connection.execute(_REPEATED, {"hardware_key": hardware_key}):
        if width is not None and speed:
            executions[stack, workload, key].append((speed, width))
    return list(executions.values())


# Statements are built once, because that takes longer than running them.


def _of_context(rows: Columns) -> tuple[Any, ...]:
    """The condition that a trial is of the context that is asked for."""
    return tuple(getattr(rows, name) == bindparam(name) for name in OF_CONTEXT)


def _both_ways(*, everywhere: bool) -> Select[*tuple[Any, ...]]:
    failed, fitted = aliased(TrialRow, name="failed"), aliased(TrialRow, name="fitted")
    ran_out = select(failed.config_key).where(failed.outcome == OutOfMemory.kind)
    repeated = select(*_CONFIG).group_by(*_CONFIG).having(func.count() > 1)
    if not everywhere:
        ran_out, repeated = ran_out.where(*_of_context(failed)), repeated.where(*_of_context(TrialRow))
    # Few configs have several trials, and an index alone tells which: only their rows are read.
    candidates = repeated.where(TrialRow.config_key.in_(ran_out)).subquery()
    query = (
        select(TrialRow, *_CONFIG)
        .join_from(candidates, TrialRow, same_config(TrialRow, candidates.c))
        .where(exists().where(same_config(fitted, candidates.c), only_of_config(fitted.outcome == Fits.kind)))
    )
    return query.order_by(*_CONFIG, TrialRow.id)


def _next_config() -> Select[*tuple[Any, ...]]:
    """All attempts, oldest first, of the config of the next trial in a family's order that is faster than `fastest`."""
    following, chosen = aliased(TrialRow, name="following"), aliased(TrialRow, name="one")
    order = (following.device_bytes, following.tokens_per_second, following.id)
    number = (
        select(following.id)
        .where(
            *_of_context(following),
            following.outcome == Fits.kind,
            following.stopped_early == bindparam("stopped_early"),
            following.family == bindparam("family"),
            tuple_(*order) > tuple_(bindparam("bytes"), bindparam("speed"), bindparam("number")),
            following.tokens_per_second > bindparam("fastest"),
        )
        .order_by(*order)
        .limit(1)
    )
    columns = (chosen.device_bytes.label("bytes"), chosen.tokens_per_second.label("speed"), chosen.id.label("number"))
    query = select(TrialRow, *columns).join(chosen, same_config(TrialRow, chosen))
    # Not by the column itself: SQLite would read all trials of the hardware, whose index has that order.
    return query.where(chosen.id == number.scalar_subquery()).order_by(TrialRow.id + 0)


def _undisturbed(rows: Columns) -> ColumnElement[bool]:
    """The condition that a trial fitted, was timed in full and not disturbed by others."""
    return and_(rows.outcome == Fits.kind, ~rows.stopped_early, ~rows.suspect)


def _repeated() -> Select[*tuple[Any, ...]]:
    latest = (
        select(
            *(getattr(TrialRow, name) for name in OF_CONFIG), TrialRow.outcome, TrialRow.stopped_early, TrialRow.suspect
        )
        .where(TrialRow.hardware_key == bindparam("hardware_key"))
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
        .where(only_of_config(_undisturbed(run)))
        .order_by(run.id)
    )


_EVERY = select(func.count()).select_from(TrialRow).where(*_of_context(TrialRow))
_OUT_OF_MEMORY = _EVERY.where(TrialRow.outcome == OutOfMemory.kind)
_FAMILIES = (
    select(TrialRow.stopped_early, TrialRow.family)
    .where(*_of_context(TrialRow), TrialRow.outcome == Fits.kind)
    .distinct()
)
_BOTH_WAYS, _BOTH_WAYS_OF_CONTEXT = _both_ways(everywhere=True), _both_ways(everywhere=False)
_NEXT_CONFIG = _next_config()
_START = {"bytes": -1, "speed": 0.0, "number": 0, "fastest": 0.0}
_REPEATED = _repeated()
