"""Columns for what the frontier asks of a trial, an index in its order, and hardware keys without the memory size."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_FLAGS = {"stopped_early": "fits", "transient": "crashed"}
_INDEX = "ix_trials_frontier"
_CONTEXT = ["workload_key", "hardware_key", "stack_key", "outcome"]
_HARDWARE = sa.table(
    "hardware", sa.column("digest", sa.String), sa.column("key", sa.String), sa.column("body", sa.JSON)
)
_TRIALS = sa.table(
    "trials",
    sa.column("id", sa.BigInteger),
    sa.column("outcome", sa.String),
    sa.column("evidence", sa.JSON),
    sa.column("deadline_seconds", sa.Double),
)
_SAME = " AND ".join(
    f"o.{name} = trials.{name}"
    for name in ("hardware_key", "stack_key", "workload_key", "config_key", "memory_limit_bytes")
)


def upgrade() -> None:
    """Adds the columns, reorders the index by family, memory and speed, and recomputes the keys."""
    for flag, outcome in _FLAGS.items():
        op.add_column("trials", sa.Column(flag, sa.Boolean, nullable=False, server_default=sa.false()))
        # Inside a JSON string the quotes would be escaped. Not parsed as JSON: PostgreSQL rejects text with \u0000.
        op.execute(
            f"UPDATE trials SET {flag} = true WHERE outcome = '{outcome}' "
            f"AND CAST(evidence AS TEXT) LIKE '%\"{flag}\":true%'".replace(":true", r"\:true")
        )
    op.add_column("trials", sa.Column("deadline_seconds", sa.Double))
    _copy_deadlines()
    op.drop_index(_INDEX, "trials")
    order = ["stopped_early", "family", "device_bytes", "tokens_per_second", "id"]
    op.create_index(_INDEX, "trials", [*_CONTEXT, *order])
    _renew_keys()


def _copy_deadlines() -> None:
    connection = op.get_bind()
    timed_out = sa.select(_TRIALS.c.id, _TRIALS.c.evidence).where(_TRIALS.c.outcome == "timed_out")
    for number, evidence in connection.execute(timed_out).all():
        deadline = sa.update(_TRIALS).where(_TRIALS.c.id == number)
        connection.execute(deadline.values(deadline_seconds=evidence["deadline_seconds"]))


def _renew_keys() -> None:
    """Recomputes hardware keys; where trials of several keys come together, renumbers their attempts."""
    connection = op.get_bind()
    # No two attempts may share a number at any moment; the negated ids, which are unique, serve in the meantime.
    op.execute("UPDATE trials SET attempt = -id")
    for digest, body in connection.execute(sa.select(_HARDWARE.c.digest, _HARDWARE.c.body)).all():
        key = _digest([body[name] for name in ("name", "kind", "device_name", "cores")])
        connection.execute(sa.update(_HARDWARE).where(_HARDWARE.c.digest == digest).values(key=key))
        renewed = sa.text("UPDATE trials SET hardware_key = :key WHERE hardware_digest = :digest")
        connection.execute(renewed, {"key": key, "digest": digest})
    op.execute(f"UPDATE trials SET attempt = (SELECT count(*) FROM trials o WHERE {_SAME} AND o.id <= trials.id)")


def _digest(data: Any) -> str:
    """`workload.digest` as it was when this was written."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
