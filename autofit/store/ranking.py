"""The trials that a frontier needs: the database selects them, `core` judges what they mean together.

Configs that ran more than once show how much executions of one config differ, and so which speeds are ties.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Double,
    Row,
    ScalarSelect,
    Select,
    String,
    and_,
    bindparam,
    case,
    cast,
    exists,
    func,
    or_,
    select,
    tuple_,
)
from sqlalchemy.orm import aliased

from autofit.core.frontier import Frontier, Point
from autofit.core.lattice import Config
from autofit.core.outcome import Fits, OutOfMemory, Trial, outcome_from_json
from autofit.core.repeatability import Execution
from autofit.core.verdict import contradiction, most_memory, standing
from autofit.store import contexts
from autofit.store.database.engine import ROWS_AT_ONCE
from autofit.store.rows import Reader, readable
from autofit.store.tables import OF_CONFIG, OF_CONTEXT, TrialRow, WorkloadRow

Columns = Any
"""`TrialRow` or an alias of it."""
_CONFIG = tuple(getattr(TrialRow, name) for name in OF_CONFIG)
NEVER = -1.0
"""A speed that no trial has."""
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


def of_own_step(rows: Columns) -> ColumnElement[bool]:
    """The condition that a trial is of autofit's own step, and not of a user's program: those show of their hardware
    what else such a program does."""
    of_trial = WorkloadRow.key == rows.workload_key
    return exists().where(of_trial, WorkloadRow.body["program"].as_string().is_(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A trial that is on its family's frontier under some memory limit, unless others of its config speak against it.

    Trials timed in full and trials stopped early have separate frontiers, so that none of the latter hides one of the
    former.
    """

    kind: tuple[bool, str]
    """Whether its timing stopped early, and its family."""
    point: Point
    attempts: Sequence[Trial]
    """All attempts of its config, oldest first; empty where it represents the config under every limit."""

    def represents(self, memory_limit_bytes: int) -> bool:
        """Whether its config is known by it under this limit (`core.verdict.standing`)."""
        if not self.attempts:
            return True
        trial = standing(self.attempts, memory_limit_bytes)
        return trial is not None and trial.trial_id == self.point.trial_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """What every frontier of a context is taken from, whatever its memory limit."""

    contenders: Sequence[Contender]
    """In the order of kind, memory, speed and age. What is left out is, under every limit, no faster than one of the
    same kind that comes before it."""
    both_ways: Sequence[Sequence[Trial]]
    """The attempts of each config whose attempts may contradict each other."""
    about: Mapping[str, Any]
    """The fields of its frontiers that depend on neither."""

    def frontier(self, memory_limit_bytes: int) -> Frontier:
        """That under a limit; 0 stands for none."""
        contradictions = (contradiction(a, memory_limit_bytes or most_memory(a)) for a in self.both_ways)
        return Frontier.of(
            sorted(self._undominated(memory_limit_bytes), key=lambda point: point.trial_id or 0),
            **self.about,
            contradictory=sum(found is not None for found in contradictions),
        )

    def _undominated(self, memory_limit_bytes: int) -> Iterator[Point]:
        """The frontiers of the families: at least those points that `Frontier.of` would keep, whichever families it is
        given."""
        for _, of_kind in groupby(self.contenders, attrgetter("kind")):
            fastest = 0.0
            for contender in of_kind:
                if contender.point.tokens_per_second > fastest and contender.represents(memory_limit_bytes):
                    fastest = contender.point.tokens_per_second
                    yield contender.point


def of_context(connection: Connection, reader: Reader, keys: Mapping[str, str], between: float) -> Ranking | None:
    """The ranking of a context, on whose hardware executions differ by `between`; None if it has no trials."""
    newest = contexts.newest_site(connection, keys)
    if newest is None:
        return None
    digest, driver = newest
    trials, out_of_memory = (connection.scalar(query, keys) for query in (_EVERY, _OUT_OF_MEMORY))
    return Ranking(
        contenders=_read_contenders(connection, reader, keys, between),
        both_ways=list(both_ways(connection, reader, keys)),
        about={
            "hardware": reader.hardware(connection, digest),
            "workload": reader.workload(connection, keys["workload_key"]),
            "stack": reader.stack(connection, keys["stack_key"], driver),
            "trials": trials,
            "out_of_memory": out_of_memory,
        },
    )


def _read_contenders(
    connection: Connection, reader: Reader, keys: Mapping[str, str], between: float
) -> list[Contender]:
    """The contenders of a context.

    An index holds the trials of each kind in that order. In one statement the database walks from each contender to the
    next trial that is faster than all earlier configs, as far as these have an attempt that represents them under every
    limit; it reads no other config's rows.
    """
    rows = connection.execute(_CONTENDERS, keys).all()
    repeated = {row.config_key: row.id for row in rows if row.known is None or row.runs > 1}
    configs = {number: config for config, number in repeated.items()}
    numbers = list(configs)
    attempts: dict[str, list[Trial]] = defaultdict(list)  # the contenders of a config share them
    for start in range(0, len(numbers), ROWS_AT_ONCE):
        for row in connection.execute(_ATTEMPTS, {"numbers": numbers[start : start + ROWS_AT_ONCE]}):
            attempts[configs[row.number]].append(reader.trial(connection, row))
    return [_contender(row, attempts.get(row.config_key, ()), between) for row in rows]


def _contender(row: Row[*tuple[Any, ...]], attempts: Sequence[Trial], between: float) -> Contender:
    with readable(f"trial {row.id}"):
        outcome = outcome_from_json(row.evidence)
        assert isinstance(outcome, Fits)
        return Contender(
            kind=(row.stopped_early, row.family),
            point=Point(
                config=Config.from_json(row.config),
                measurement=outcome.measurement,
                trial_id=row.id,
                runs=sum(t.timed_in_full for t in attempts) if attempts else int(not row.stopped_early),
                between=between,
                in_doubt=row.suspect,
            ),
            attempts=attempts,
        )


def both_ways(connection: Connection, reader: Reader, keys: Mapping[str, str] | None = None) -> Iterator[list[Trial]]:
    """The attempts of each config that has run out of memory and has fitted in no more, which contradict each other
    unless later ones have settled it: of one context, or of all."""
    rows = connection.execute(_BOTH_WAYS if keys is None else _BOTH_WAYS_OF_CONTEXT, keys or {})
    for _, attempts in groupby(rows, lambda row: row[-len(_CONFIG) :]):
        yield [reader.trial(connection, row) for row in attempts]


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


def _of_context(rows: Columns) -> tuple[Any, ...]:
    """The condition that a trial is of the context that is asked for."""
    return tuple(getattr(rows, name) == bindparam(name) for name in OF_CONTEXT)


def _fitted(rows: Columns) -> tuple[Any, ...]:
    """The condition that a trial of that context fitted."""
    return *_of_context(rows), rows.outcome == Fits.kind


def _both_ways(*, everywhere: bool) -> Select[*tuple[Any, ...]]:
    failed, fitted = aliased(TrialRow, name="failed"), aliased(TrialRow, name="fitted")
    # Few configs have several trials, and an index alone tells which: only their rows are read.
    several = func.count() > 1
    candidates = select(*_CONFIG).group_by(*_CONFIG).having(several).subquery()
    if not everywhere:  # what is the same for all takes as long to group by
        same = (bindparam(name, type_=String).label(name) for name in OF_CONTEXT)
        of_context = select(*same, TrialRow.config_key).where(*_of_context(TrialRow))
        candidates = of_context.group_by(TrialRow.config_key).having(several).subquery()
    ways = (failed.outcome == OutOfMemory.kind, fitted.outcome == Fits.kind)
    contradicts = only_of_config(and_(*ways, fitted.device_bytes <= failed.memory_limit_bytes))
    query = (
        select(TrialRow, *_CONFIG)
        .join_from(candidates, TrialRow, same_config(TrialRow, candidates.c))
        .where(exists().where(same_config(failed, candidates.c), same_config(fitted, candidates.c), contradicts))
    )
    return query.order_by(*_CONFIG, TrialRow.id)


def _known(row: Columns) -> ScalarSelect[float]:
    """What the database can tell of how a fitting trial's config is known (`core.verdict.standing`).

    The least speed by which it may be known under any limit, where every trial by which it may be is of this one's kind
    and comes no later in its order; `NEVER` where it is known by others only; NULL where that depends on the limit.

    It depends on none where a config has only fitted, by trials that are not set aside, or has run out of less memory
    than any of these took; if one that was stopped early takes no less than all that were timed in full, it counts only
    where there are none of them.
    """
    each = aliased(TrialRow, name="each")
    fits, ran_out = each.outcome == Fits.kind, each.outcome == OutOfMemory.kind
    full, alike = and_(fits, ~each.stopped_early), and_(fits, each.stopped_early == row.stopped_early)
    later = and_(alike, tuple_(*_order(each)) > tuple_(*_order(row)))
    set_aside = and_(each.suspect, each.device_state["set_aside"].as_string().is_not(None))
    least, least_full = func.min(each.device_bytes), func.min(case((full, each.device_bytes)))
    whatever_the_limit = and_(
        func.max(case((or_(ran_out, and_(fits, ~set_aside)), 0), else_=1)) == 0,
        func.coalesce(func.max(case((ran_out, each.memory_limit_bytes))), 0) < least,
        func.coalesce(least_full, least) == least,
    )
    none_later = func.max(case((later, 1), else_=0)) == 0
    value = case(
        (~whatever_the_limit, None),
        (and_(row.stopped_early, least_full.is_not(None)), NEVER),
        (none_later, func.min(case((alike, each.tokens_per_second)))),
    )
    return select(value).where(same_config(each, row)).correlate(row).scalar_subquery()


def _order(row: Columns) -> tuple[Any, ...]:
    return row.device_bytes, row.tokens_per_second, row.id


def _contenders() -> Select[*tuple[Any, ...]]:
    kinds = select(TrialRow.stopped_early, TrialRow.family).where(*_fitted(TrialRow)).distinct().subquery()
    before_all = {"bytes": cast(-1, BigInteger), "speed": cast(0, Double), "number": cast(0, BigInteger)}
    none_known = {"known": cast(0, Double), "fastest": cast(0, Double)}
    start = select(kinds, *(value.label(name) for name, value in {**before_all, **none_known}.items()))
    last = start.cte("contenders", recursive=True)
    fastest = case((last.c.known > last.c.fastest, last.c.known), else_=last.c.fastest)
    following, found = aliased(TrialRow, name="following"), aliased(TrialRow, name="found")
    number = (
        select(following.id)
        .where(
            *_fitted(following),
            following.stopped_early == last.c.stopped_early,
            following.family == last.c.family,
            tuple_(*_order(following)) > tuple_(last.c.bytes, last.c.speed, last.c.number),
            following.tokens_per_second > fastest,
        )
        .order_by(*_order(following))
        .limit(1)
        .correlate(last)
        .scalar_subquery()
    )
    columns = (last.c.stopped_early, last.c.family, *_order(found), _known(found), fastest)
    every = last.union_all(select(*columns).join_from(last, found, found.id == number))
    other = aliased(TrialRow, name="other")
    alike = case((and_(other.outcome == Fits.kind, other.stopped_early == TrialRow.stopped_early), 1), else_=0)
    runs = select(func.sum(alike)).where(same_config(other, TrialRow)).scalar_subquery().label("runs")
    return (
        select(TrialRow.id, TrialRow.stopped_early, TrialRow.family, TrialRow.config, TrialRow.config_key)
        .add_columns(TrialRow.evidence, TrialRow.suspect, every.c.known, runs)
        .join_from(every, TrialRow, TrialRow.id == every.c.number)
        .where(or_(every.c.known.is_(None), every.c.known != NEVER))
        .order_by(TrialRow.stopped_early, TrialRow.family, *_order(TrialRow))
    )


def _attempts() -> Select[*tuple[Any, ...]]:
    """All attempts, oldest first, of the configs of given trials."""
    one = aliased(TrialRow, name="one")
    query = select(TrialRow, one.id.label("number")).join_from(one, TrialRow, same_config(TrialRow, one))
    return query.where(one.id.in_(bindparam("numbers", expanding=True))).order_by(one.id, TrialRow.id + 0)


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
        .where(only_of_config(_undisturbed(run)))
        .order_by(run.id)
    )


_EVERY = select(func.count()).select_from(TrialRow).where(*_of_context(TrialRow))
_OUT_OF_MEMORY = _EVERY.where(TrialRow.outcome == OutOfMemory.kind)
_BOTH_WAYS, _BOTH_WAYS_OF_CONTEXT = _both_ways(everywhere=True), _both_ways(everywhere=False)
_CONTENDERS, _ATTEMPTS = _contenders(), _attempts()
_REPEATED = _repeated()
