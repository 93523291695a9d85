"""Contexts: what shares a frontier, and a version that says when it has changed."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, func, select
from sqlalchemy.dialects import postgresql, sqlite

from autofit.store.tables import ContextRow, TrialRow

Context = tuple[str, str, str]
"""Keys of hardware, stack and workload."""


def renew(connection: Connection, contexts: Collection[Context], newest: int) -> None:
    """Says that these have new trials, none newer than `newest`. Their rows stay locked until the transaction ends, so
    that of two writers the later one has the higher version."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    adding = insert(ContextRow)
    raised = {"version": ContextRow.version + 1, "last_trial_id": adding.excluded.last_trial_id}
    keys = ("hardware_key", "stack_key", "workload_key")
    # In one order for all writers, so that no two deadlock.
    rows = [dict(zip(keys, one, strict=True)) | {"version": 1, "last_trial_id": newest} for one in sorted(contexts)]
    connection.execute(adding.on_conflict_do_update(index_elements=keys, set_=raised), rows)


def newest_trial(connection: Connection) -> int:
    """The number of the newest trial, 0 if there is none."""
    return connection.scalar(select(func.max(TrialRow.id))) or 0


def version(connection: Connection, hardware_key: str | None, workload_key: str | None) -> str:
    """Differs whenever trials of this hardware and workload have come between; None stands for any."""
    if hardware_key is None or workload_key is None:
        return str(newest_trial(connection))
    rows = select(ContextRow.version, ContextRow.last_trial_id).where(
        ContextRow.hardware_key == hardware_key, ContextRow.workload_key == workload_key
    )
    return ".".join(
        f"{row.version}-{row.last_trial_id}" for row in connection.execute(rows.order_by(ContextRow.stack_key))
    )


def stacks(connection: Connection, hardware_key: str, workload_key: str) -> list[str]:
    """Keys of the stacks that this workload ran under on this hardware, most recently used first."""
    query = select(ContextRow.stack_key).where(
        ContextRow.hardware_key == hardware_key, ContextRow.workload_key == workload_key
    )
    return list(connection.scalars(query.order_by(ContextRow.last_trial_id.desc())))
