"""The driver's version is noted with each trial and no longer separates the trials of one stack."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

_STACKS = sa.table("stacks", sa.column("key", sa.String), sa.column("body", sa.JSON))
_IDENTITY = ("hardware_key", "stack_key", "workload_key", "config_key", "memory_limit_bytes")
_SAME = " AND ".join(f"o.{name} = trials.{name}" for name in _IDENTITY)
_SAME_PROBE = "o.hardware_key = probes.hardware_key AND o.shapes_key = probes.shapes_key"


def upgrade() -> None:
    """Adds the column, and gives stacks that differ in the driver alone one key: their trials share a frontier."""
    op.add_column("trials", sa.Column("driver", sa.String))
    connection = op.get_bind()
    stacks = connection.execute(sa.select(_STACKS.c.key, _STACKS.c.body)).all()
    # While stacks change, no two attempts share a number: the negated ids, which are unique, stand in for them.
    op.execute("UPDATE trials SET attempt = -id")
    for old, body in stacks:
        driver = body.get("driver")
        if driver is not None:
            noted = sa.text("UPDATE trials SET driver = :driver WHERE stack_key = :old")
            connection.execute(noted, {"driver": driver, "old": old})
            _move(old, _key_of_stored({**body, "driver": None}))
    _renumber()


def _renumber() -> None:
    """Attempts count up again, and contexts are those of the trials, with versions that they never had."""
    op.execute(f"UPDATE trials SET attempt = (SELECT count(*) FROM trials o WHERE {_SAME} AND o.id <= trials.id)")
    op.execute("DELETE FROM contexts")
    keys = ", ".join(_IDENTITY[:3])
    op.execute(f"INSERT INTO contexts SELECT {keys}, count(*) + 1, max(id) FROM trials GROUP BY {keys}")


def _key_of_stored(body: dict[str, Any]) -> str:
    """The key of a stack, whose row is there."""
    key = _digest({name: version for name, version in body.items() if version is not None})
    connection = op.get_bind()
    if connection.scalar(sa.select(_STACKS.c.key).where(_STACKS.c.key == key)) is None:
        connection.execute(sa.insert(_STACKS).values(key=key, body=body))
    return key


def _move(old: str, new: str) -> None:
    """Gives what refers to one stack another; of two probes of one device the newest stays."""
    connection, keys = op.get_bind(), {"old": old, "new": new}
    for stack, other, order in (("old", "new", "<"), ("new", "old", "<=")):
        better = f"o.stack_key = :{other} AND probes.recorded_at {order} o.recorded_at"
        beaten = f"EXISTS (SELECT 1 FROM probes o WHERE {_SAME_PROBE} AND {better})"
        connection.execute(sa.text(f"DELETE FROM probes WHERE stack_key = :{stack} AND {beaten}"), keys)
    for table in ("trials", "searches", "probes"):
        connection.execute(sa.text(f"UPDATE {table} SET stack_key = :new WHERE stack_key = :old"), keys)
    connection.execute(sa.text("DELETE FROM stacks WHERE key = :old"), {"old": old})


def _digest(data: Any) -> str:
    """`workload.digest` as it was when this was written."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
