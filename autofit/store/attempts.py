"""How trials become rows: the numbering of attempts, and what counts as an exact repeat."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, cast

from sqlalchemy import Connection, bindparam, func, insert, select, text, update

from autofit import __version__
from autofit.core.outcome import Trial, outcome_from_json
from autofit.store.contexts import Context, changed, newest_trial, renew
from autofit.store.rows import Values, keep, readable, trial_values
from autofit.store.searches.lease import Lease, add_event, record_under_lease, update_held_search
from autofit.store.tables import OF_CONTEXT, OF_IDENTITY, SearchRow, TrialRow, table_of

Identity = tuple[str, str, str, str, int]
"""Keys of hardware, stack, workload and config, and the memory limit in bytes."""


def add(connection: Connection, trial: Trial, lease: Lease | None, uid: str) -> int:
    """Adds a storable `trial` as the next attempt of its identity, and as an event of the search whose lease is given,
    unless the write with this `uid` has been done; returns its id. Raises `LeaseLost`, and `IntegrityError` if another
    process takes the same number at the same time."""
    written: int | None = connection.scalar(_BY_UID, {"uid": uid})
    if written is not None:  # the connection was lost while it was committed
        return written
    values = trial_values(trial) | keep(connection, trial.hardware, trial.stack, trial.workload)
    last = connection.scalar(_LAST_ATTEMPT, {name: values[name] for name in OF_IDENTITY})
    values |= {"uid": uid, "attempt": (last or 0) + 1, "autofit_version": __version__}
    values |= {} if lease is None else {"search_id": lease.search_id, "search_epoch": lease.epoch}
    seq = 0 if lease is None else update_held_search(connection, lease, spent_trials=SearchRow.spent_trials + 1)
    number = int(connection.execute(_INSERT, values).scalar_one())
    renew(connection, {_context(values): number})
    if lease is not None:
        event_fields = ("config", "outcome", "device_bytes", "tokens_per_second", "seconds")
        body = {"trial_id": number, **{name: values[name] for name in event_fields}}
        add_event(connection, lease.search_id, seq, "trial", body)
    return number


def set_aside(connection: Connection, trial: Trial, lease: Lease | None) -> None:
    """Writes again what says that a stored `trial` is set aside, and tells the search whose lease is given."""
    if lease is not None:
        body = {"trial_id": trial.trial_id, "reason": trial.why_set_aside}
        record_under_lease(connection, lease, "set_aside", body)
    values = trial_values(trial)
    written = {name: values[name] for name in ("device_state", "suspect")}
    connection.execute(update(TrialRow).where(TrialRow.id == trial.trial_id).values(written))
    changed(connection, (trial.hardware.key, trial.stack.key, trial.workload.key))


def add_new(connection: Connection, trials: Sequence[Trial]) -> tuple[int, int]:
    """Adds the storable trials that are not there yet, each as the next attempt of its identity. Returns how many were
    added and how many were repeats: of the same identity, time and outcome. Nobody else can write meanwhile."""
    if connection.dialect.name == "postgresql":
        # The tables are locked in the order in which every writer takes them.
        tables = "hardware, stacks, workloads, trials, contexts"
        connection.execute(text(f"LOCK TABLE {tables} IN SHARE ROW EXCLUSIVE MODE"))
    keep_once = cache(partial(keep, connection))
    rows = [trial_values(trial) | keep_once(trial.hardware, trial.stack, trial.workload) for trial in trials]
    attempts, marks = _present(connection, rows)
    new: list[Values] = []
    for row in rows:
        identity = cast(Identity, tuple(row[name] for name in OF_IDENTITY))
        mark = _mark(row["recorded_at"], row["evidence"])
        if mark in marks[identity]:
            continue
        marks[identity].add(mark)
        attempts[identity] += 1
        new.append({**row, "attempt": attempts[identity], "search_id": None})
    if new:
        connection.execute(insert(TrialRow), new)
        renew(connection, {context: newest_trial(connection, context) for context in map(_context, new)})
    return len(new), len(rows) - len(new)


def _context(row: Values) -> Context:
    return cast(Context, tuple(row[name] for name in OF_CONTEXT))


def _mark(recorded_at: str, evidence: dict[str, Any]) -> tuple[str, str]:
    return recorded_at, json.dumps(evidence, sort_keys=True)


def _present(
    connection: Connection, rows: Sequence[Values]
) -> tuple[dict[Identity, int], dict[Identity, set[tuple[str, str]]]]:
    """For each identity in `rows`, the number of its last attempt and the marks of all its attempts."""
    attempts: dict[Identity, int] = defaultdict(int)
    marks: dict[Identity, set[tuple[str, str]]] = defaultdict(set)
    by_context: dict[Context, set[str]] = defaultdict(set)
    for row in rows:
        by_context[_context(row)].add(row["config_key"])
    for context, configs in by_context.items():
        columns = (TrialRow.config_key, TrialRow.memory_limit_bytes, TrialRow.attempt)
        query = (
            select(*columns, TrialRow.recorded_at, TrialRow.evidence)
            .filter_by(**dict(zip(OF_CONTEXT, context, strict=True)))
            .where(TrialRow.config_key.in_(configs))
        )
        for config_key, limit, attempt, recorded_at, evidence in connection.execute(query):
            identity: Identity = (*context, config_key, limit)
            attempts[identity] = max(attempts[identity], attempt)
            # Read and written again, so that an outcome in an older format compares equal to today's.
            with readable(f"attempt {attempt} of config {config_key}"):
                marks[identity].add(_mark(recorded_at, outcome_from_json(evidence).to_json()))
    return attempts, marks


# Statements are built once, of the table and not of its model: both take longer than running them.

_TRIALS = table_of(TrialRow)
_BY_UID = select(_TRIALS.c.id).where(_TRIALS.c.uid == bindparam("uid"))
_LAST_ATTEMPT = select(func.max(_TRIALS.c.attempt)).where(*(_TRIALS.c[name] == bindparam(name) for name in OF_IDENTITY))
_INSERT = insert(_TRIALS).returning(_TRIALS.c.id)
