"""The frontier, computed inside the database: of 100,000 trials, only the few that matter are read."""

from __future__ import annotations

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    ScalarSelect,
    Select,
    and_,
    case,
    exists,
    func,
    or_,
    select,
    true,
)
from sqlalchemy.orm import aliased

from autofit.outcome import Diverged, Fits, OutOfMemory
from autofit.store.contradictions import Columns, contradicted, in_full, only_of_config, same_config, same_context
from autofit.store.tables import TrialRow
from autofit.trial.request import DEADLINE_SECONDS


def of_context(hardware_key: str, stack_key: str, workload_key: str) -> tuple[ColumnElement[bool], ...]:
    """The condition that a trial is of one hardware, stack and workload."""
    return same_context(TrialRow, hardware_key, stack_key, workload_key)


def undominated(
    hardware_key: str, stack_key: str, workload_key: str, memory_limit_bytes: int | None
) -> Select[tuple[int]]:
    """The ids of the trials on the frontiers of the families: at least those that `Frontier.of` would keep, whichever
    families it is given. Trials timed in full and trials stopped early have separate frontiers, so that none of the
    latter hides one of the former.

    Of each config only the latest attempt that stands counts (`_stands`). The index holds every family's trials in the
    order of memory, then speed: from one point of a frontier the database looks for the next row that is faster, so
    that it reads no row twice and sorts nothing.
    """
    context = (hardware_key, stack_key, workload_key)
    groups = (
        select(TrialRow.stopped_early, TrialRow.family)
        .where(*same_context(TrialRow, *context), TrialRow.outcome == Fits.kind)
        .distinct()
        .subquery()
    )
    first = _next(context, groups, None, memory_limit_bytes)
    steps = select(*groups.c, first.label("id")).cte("steps", recursive=True)
    here = aliased(TrialRow, name="here")
    following = _next(context, steps, here, memory_limit_bytes)
    walked = (steps.c.stopped_early, steps.c.family)
    steps = steps.union_all(select(*walked, following.label("id")).join_from(steps, here, here.id == steps.c.id))
    return select(steps.c.id).where(steps.c.id.is_not(None))


def runs() -> ScalarSelect[int]:
    """How often a trial's config has fitted and been timed in full, under any limit."""
    other = aliased(TrialRow, name="other_run")
    times = select(func.coalesce(func.sum(case((in_full(other), 1), else_=0)), 0))
    return times.where(same_config(other, TrialRow)).correlate(TrialRow).scalar_subquery()


def counts(connection: Connection, context: tuple[ColumnElement[bool], ...]) -> tuple[int, int]:
    """How many trials there are, and how many of them ran out of memory."""
    every = select(func.count()).select_from(TrialRow).where(*context)
    found = [connection.scalar(query) or 0 for query in (every, every.where(TrialRow.outcome == OutOfMemory.kind))]
    return found[0], found[1]


def _next(
    context: tuple[str, str, str], group: FromClause, here: Columns | None, limit: int | None
) -> ScalarSelect[int]:
    """The lightest trial of a group that stands and, if `here` is given, is faster than it and no lighter."""
    rows = aliased(TrialRow, name="candidate")
    query = select(rows.id).where(
        *same_context(rows, *context),
        rows.outcome == Fits.kind,
        rows.stopped_early == group.c.stopped_early,
        rows.family == group.c.family,
        *_stands(rows, limit),
    )
    if here is not None:
        query = query.where(
            rows.device_bytes >= here.device_bytes,
            rows.tokens_per_second > here.tokens_per_second,
        )
    query = query.order_by(rows.device_bytes, rows.tokens_per_second, rows.id).limit(1)
    return query.correlate(group, *([] if here is None else [here])).scalar_subquery()


def _stands(rows: Columns, limit: int | None) -> tuple[ColumnElement[bool], ...]:
    """Whether a fitting trial stands for its config: no later attempt replaces or refutes it, no attempt at any time
    contradicts it and, if it was stopped early or its time is in doubt, there is no valid attempt that was timed in
    full, or whose time is not.
    """
    later = aliased(TrialRow, name="later")
    refuted = exists().where(same_config(later, rows), later.id > rows.id, _refutes(later, rows, limit))
    return (
        ~refuted,
        ~contradicted(rows, limit),
        or_(~rows.stopped_early, ~_beside(rows, limit, clean=False)),
        or_(~rows.suspect, ~_beside(rows, limit, clean=True)),
    )


def _beside(rows: Columns, limit: int | None, *, clean: bool) -> ColumnElement[bool]:
    """Whether the trial's config has a valid attempt that was timed in full and, if `clean`, without doubts."""
    names = ("clean", "after_clean") if clean else ("timed_in_full", "after_it")
    full, after = (aliased(TrialRow, name=name) for name in names)
    refuted = exists().where(same_config(after, full), after.id > full.id, _fails(after, full, limit))
    fits = and_(in_full(full), ~full.suspect) if clean else in_full(full)
    return exists().where(same_config(full, rows), only_of_config(fits), ~refuted, _speaks(full, rows, limit))


def _refutes(later: Columns, rows: Columns, limit: int | None) -> ColumnElement[bool]:
    """Whether a later attempt of the same config takes the place of a fitting one."""
    no_worse = and_(or_(~later.stopped_early, rows.stopped_early), or_(~later.suspect, rows.suspect))
    again = and_(later.outcome == Fits.kind, no_worse, _speaks(later, rows, limit))
    return or_(again, _fails(later, rows, limit))


def _speaks(fitted: Columns, rows: Columns, limit: int | None) -> ColumnElement[bool]:
    """Whether a fitting attempt may take the place of another. It may not if the other stayed within the limit while it
    exceeded it only by memory that it had reserved but not allocated. A search runs such a config again."""
    if limit is None:
        return true()
    return or_(rows.device_bytes > limit, fitted.device_bytes <= limit, fitted.peak_allocated_bytes > limit)


def _fails(later: Columns, rows: Columns, limit: int | None) -> ColumnElement[bool]:
    """Whether a later attempt failed in a way that overrides a fitting one.

    For a question about `limit`, as a search under that limit judges it (`search.knowledge.verdict`): it ran out of
    memory under the limit or a higher one, or failed otherwise under exactly the limit. Without a limit, and for a
    fitting trial that exceeds it: it failed under that trial's own limit or a higher one. Divergence counts under any
    limit. Failures of the machinery say nothing about the config, nor do deadlines shorter than the default, nor those
    missed on a device that was busy.
    """
    own = later.memory_limit_bytes >= rows.memory_limit_bytes
    if limit is None:
        where = own
    else:
        out_of_memory = and_(later.outcome == OutOfMemory.kind, later.memory_limit_bytes >= limit)
        otherwise = and_(later.outcome != OutOfMemory.kind, later.memory_limit_bytes == limit)
        within = rows.device_bytes <= limit
        where = or_(and_(within, or_(out_of_memory, otherwise)), and_(~within, own))
    where = or_(where, later.outcome == Diverged.kind)
    too_short = and_(later.deadline_seconds.is_not(None), later.deadline_seconds < DEADLINE_SECONDS)
    return and_(later.outcome != Fits.kind, ~later.transient, ~later.suspect, ~too_short, where)
