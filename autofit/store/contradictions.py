"""Contradictory results, found inside the database by the rule of `autofit.contradiction`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, case, exists, func, not_, select
from sqlalchemy.orm import aliased

from autofit.contradiction import FITS_TO_DISPROVE, Contradiction, contradiction
from autofit.outcome import Fits, OutOfMemory
from autofit.store.rows import TRIAL_COLUMNS, Reader
from autofit.store.tables import TrialRow

Columns = Any
"""`TrialRow` or an alias of it."""


def contradicted(rows: Columns, limit: int | None) -> ColumnElement[bool]:
    """Whether a fitting trial is no answer to a question about `limit`, because another trial of its config, earlier or
    later, ran out of device memory under that limit or a higher one and was not disproved by later trials.

    Without a limit, and for a trial that exceeds it, the question is about the limit under which the fitting trial ran.
    """
    failed = aliased(TrialRow, name="failed")
    asked = rows.memory_limit_bytes
    if limit is not None:
        asked = case((rows.device_bytes <= limit, limit), else_=asked)
    return exists().where(same_config(failed, rows), failed.memory_limit_bytes >= asked, *_still_counts(failed))


def count(connection: Connection, keys: tuple[str, str, str], limit: int | None) -> int:
    """How many configs of one hardware, stack and workload have contradictory results, for a question about `limit` or,
    without one, about the limits of their trials.

    Only configs with several trials are examined; an index alone tells which they are.
    """
    failed = aliased(TrialRow, name="failed")
    config = TrialRow.config_key
    repeated = select(config).where(*same_context(TrialRow, *keys)).group_by(config).having(func.count() > 1)
    fitting = aliased(TrialRow, name="fitting")
    if limit is None:
        contradicts = fitting.memory_limit_bytes <= failed.memory_limit_bytes
    else:
        contradicts = and_(fitting.device_bytes <= limit, failed.memory_limit_bytes >= limit)
    query = select(func.count(failed.config_key.distinct())).where(
        *same_context(failed, *keys),
        failed.config_key.in_(repeated),
        *_still_counts(failed),
        _has_fitted(fitting, failed, contradicts),
    )
    return connection.scalar(query) or 0


def every(connection: Connection, reader: Reader) -> Iterator[Contradiction]:
    """All results in a store that are contradictory for some limit."""
    failed, fitting = (aliased(TrialRow, name=name) for name in ("failed", "fitting"))
    config = (TrialRow.hardware_key, TrialRow.stack_key, TrialRow.workload_key, TrialRow.config_key)
    repeated = select(*config).group_by(*config).having(func.count() > 1).subquery()
    wrong = (
        select(*(repeated.c[column.key] for column in config))
        .join_from(repeated, failed, same_config(failed, repeated.c))
        .where(
            *_still_counts(failed),
            _has_fitted(fitting, failed, fitting.device_bytes <= failed.memory_limit_bytes),
        )
        .distinct()
        .subquery()
    )
    query = select(*TRIAL_COLUMNS, *config[::3]).join_from(wrong, TrialRow, same_config(TrialRow, wrong.c))
    rows = connection.execute(query.order_by(*config, TrialRow.id))
    for _, attempts in groupby(rows, lambda r: (r.hardware_key, r.stack_key, r.workload_key, r.config_key)):
        found = contradiction([reader.trial(connection, row) for row in attempts])
        if found is not None:
            yield found


def _has_fitted(fitting: Columns, failed: Columns, contradicts: ColumnElement[bool]) -> ColumnElement[bool]:
    """Whether the config of a failed trial has also fitted, in a trial that meets `contradicts`."""
    return exists().where(same_config(fitting, failed), only_of_config(fitting.outcome == Fits.kind), contradicts)


def _still_counts(failed: Columns) -> tuple[ColumnElement[bool], ...]:
    """The conditions that a trial ran out of device memory and that later trials have not disproved it."""
    since = aliased(TrialRow, name="since")
    fits = select(func.count()).where(
        same_config(since, failed),
        since.id > failed.id,
        only_of_config(in_full(since)),
        since.memory_limit_bytes <= failed.memory_limit_bytes,
    )
    on_host = func.coalesce(failed.evidence["host"].as_boolean(), False)
    return (
        only_of_config(failed.outcome == OutOfMemory.kind),
        only_of_config(not_(on_host)),
        fits.correlate(failed).scalar_subquery() < FITS_TO_DISPROVE,
    )


def in_full(rows: Columns) -> ColumnElement[bool]:
    """The condition that a trial fitted and was timed in full."""
    return and_(rows.outcome == Fits.kind, ~rows.stopped_early)


def only_of_config(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """`condition` on the trials of one config, wrapped in a CASE so that the database finds the config's few rows by
    their key instead of using the index of all trials with one outcome."""
    return case((condition, 1), else_=0) == 1


def same_context(rows: Columns, hardware_key: Any, stack_key: Any, workload_key: Any) -> tuple[Any, ...]:
    """The condition that a trial is of one hardware, stack and workload."""
    return (
        rows.workload_key == workload_key,
        rows.hardware_key == hardware_key,
        rows.stack_key == stack_key,
    )


def same_config(one: Columns, other: Columns) -> ColumnElement[bool]:
    """The condition that two trials are of one config, hardware, stack and workload."""
    same = same_context(one, other.hardware_key, other.stack_key, other.workload_key)
    return and_(*same, one.config_key == other.config_key)
