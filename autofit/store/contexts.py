"""Contexts: what shares a frontier, and a version that says when it has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, and_, bindparam, case, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from autofit.store.tables import OF_CONTEXT, ContextRow, HardwareRow, TrialRow, WorkloadRow, table_of

Context = tuple[str, str, str]
"""Keys of hardware, stack and workload."""


def renew(connection: Connection, newest: Mapping[Context, int]) -> None:
    """Says that these have new trials, of which these are the newest. Their rows stay locked until the transaction
    ends, so that of two writers the later one has the higher version."""
    # In one order for all writers, so that no two deadlock.
    rows = [
        dict(zip(OF_CONTEXT, context, strict=True)) | {"version": 1, "last_trial_id": number}
        for context, number in sorted(newest.items())
    ]
    connection.execute(_RENEW[connection.dialect.name], rows)


def newest_trial(connection: Connection, context: Context) -> int:
    """The number of the newest trial of a context that has one."""
    number = connection.scalar(_NEWEST_OF_CONTEXT, dict(zip(OF_CONTEXT, context, strict=True)))
    assert number is not None
    return int(number)


def changed(connection: Connection, context: Context) -> None:
    """Says that a trial of this one is set aside."""
    raised = update(ContextRow).values(version=ContextRow.version + 1, set_asides=ContextRow.set_asides + 1)
    connection.execute(raised.filter_by(**dict(zip(OF_CONTEXT, context, strict=True))))


def workloads(connection: Connection, *, model: str | None, hardware_key: str | None) -> list[str]:
    """The keys of the workloads that trials ran, of one model or on one hardware if given, most recently used first."""
    of_hardware = () if hardware_key is None else (ContextRow.hardware_key == hardware_key,)
    of_model = () if model is None else (WorkloadRow.model == model,)
    keys = select(ContextRow.workload_key).join(WorkloadRow, WorkloadRow.key == ContextRow.workload_key)
    grouped = keys.where(*of_hardware, *of_model).group_by(ContextRow.workload_key)
    return list(connection.scalars(grouped.order_by(func.max(ContextRow.last_trial_id).desc())))


def state(connection: Connection, keys: Mapping[str, str]) -> Row[*tuple[Any, ...]] | None:
    """A context's newest trial, with the digest of its hardware and its driver, and how often one of its trials was set
    aside; None for a context without trials."""
    return connection.execute(_STATE, keys).one_or_none()


def hardware(connection: Connection) -> list[str]:
    """The digests of the hardware that trials ran on, one per key, most recently used first."""
    return list(connection.scalars(_EVERY_HARDWARE))


def version(connection: Connection, hardware_key: str | None, workload_key: str | None) -> str:
    """Differs once trials of this hardware and workload were added or set aside; None stands for any."""
    if hardware_key is None or workload_key is None:
        changes = _CHANGES if hardware_key is None else _CHANGES_OF_HARDWARE
        return str(connection.scalar(changes, {"hardware_key": hardware_key}) or 0)
    rows = connection.execute(_STACKS, {"hardware_key": hardware_key, "workload_key": workload_key})
    return ".".join(f"{row.version}-{row.last_trial_id}" for row in rows)


def versions(connection: Connection) -> list[tuple[Context, str]]:
    """Every context, with its version."""
    columns = [getattr(ContextRow, name) for name in OF_CONTEXT]
    rows = connection.execute(select(ContextRow.version, *columns))
    return [((*keys,), str(raised)) for raised, *keys in rows]


def stacks(connection: Connection, hardware_key: str, workload_key: str) -> list[str]:
    """Keys of the stacks that this workload ran under on this hardware, most recently used first."""
    rows = connection.execute(_STACKS, {"hardware_key": hardware_key, "workload_key": workload_key})
    return [row.stack_key for row in rows]


# Statements are built once, because that takes longer than running them.


def _renewal(adding: sqlite.Insert | postgresql.Insert) -> sqlite.Insert | postgresql.Insert:
    given, stored = adding.excluded.last_trial_id, ContextRow.last_trial_id
    # Of two writers at once, the one with the newer trial may be the first.
    raised = {"version": ContextRow.version + 1, "last_trial_id": case((given > stored, given), else_=stored)}
    return adding.on_conflict_do_update(index_elements=OF_CONTEXT, set_=raised)


_RENEW = {
    "sqlite": _renewal(sqlite.insert(table_of(ContextRow))),
    "postgresql": _renewal(postgresql.insert(table_of(ContextRow))),
}
_CHANGES = select(func.sum(ContextRow.version))
_CHANGES_OF_HARDWARE = _CHANGES.where(ContextRow.hardware_key == bindparam("hardware_key"))
_STACKS = (
    select(ContextRow.stack_key, ContextRow.version, ContextRow.last_trial_id)
    .where(ContextRow.hardware_key == bindparam("hardware_key"), ContextRow.workload_key == bindparam("workload_key"))
    .order_by(ContextRow.last_trial_id.desc())
)
_NEWEST = select(func.max(TrialRow.id)).where(TrialRow.hardware_key == HardwareRow.key).correlate(HardwareRow)
# One look into an index for each, whatever the number of trials.
_EVERY_HARDWARE = (
    select(TrialRow.hardware_digest)
    .where(TrialRow.id.in_(select(_NEWEST.scalar_subquery()).select_from(HardwareRow)))
    .order_by(TrialRow.id.desc())
)
_NEWEST_OF_CONTEXT = select(func.max(TrialRow.id)).where(
    *(getattr(TrialRow, name) == bindparam(name) for name in OF_CONTEXT)
)
# Not by `last_trial_id`, which imports of older versions gave to all contexts that they changed.
_STATE = (
    select(TrialRow.id, TrialRow.hardware_digest, TrialRow.driver, ContextRow.set_asides)
    .join_from(TrialRow, ContextRow, and_(*(getattr(ContextRow, n) == getattr(TrialRow, n) for n in OF_CONTEXT)))
    .where(TrialRow.id == _NEWEST_OF_CONTEXT.scalar_subquery())
)
