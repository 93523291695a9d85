"""Searches that wait for a runner, run under a lease, and say what happened in events."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_STATES = {"done": "succeeded", "interrupted": "cancelled"}
_UNKNOWN_AT_FIRST = {"hardware_digest": "hardware.digest", "stack_key": "stacks.key"}


def upgrade() -> None:
    """Adds the columns and the events; a search that is queued knows neither its hardware's details nor its stack."""
    if op.get_bind().dialect.name == "sqlite":
        _rebuild()
    else:
        for name in _UNKNOWN_AT_FIRST:
            op.alter_column("searches", name, nullable=True)
    op.alter_column("searches", "status", new_column_name="state")
    for table, added in _added().items():
        for column in added:
            op.add_column(table, column)
    for old, new in _STATES.items():
        op.execute(f"UPDATE searches SET state = '{new}' WHERE state = '{old}'")
    # Nobody drives them any more, and whoever asks the same finds their trials.
    op.execute("UPDATE searches SET state = 'failed' WHERE state = 'running'")
    active = sa.text("state IN ('queued', 'running')")
    op.create_index(
        "uq_searches_digest", "searches", ["digest"], unique=True, sqlite_where=active, postgresql_where=active
    )
    op.create_index("uq_searches_idempotency_key", "searches", ["idempotency_key"], unique=True)
    op.create_index("ix_searches_state", "searches", ["state", "started_at"])
    op.create_table(
        "events",
        sa.Column("search_id", sa.String, nullable=False),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("at", sa.String, nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("search_id", "seq", name="pk_events"),
        sa.ForeignKeyConstraint(["search_id"], ["searches.search_id"], name="fk_events_search_id"),
    )


def _added() -> dict[str, list[sa.Column[Any]]]:
    """The new columns of each table."""
    counters = [
        sa.Column(name, kind, nullable=False, server_default="0")
        for name, kind in (
            ("lease_epoch", sa.Integer()),
            ("spent_seconds", sa.Double()),
            ("spent_trials", sa.Integer()),
            ("last_seq", sa.Integer()),
        )
    ]
    texts = ("digest", "idempotency_key", "campaign_id", "hardware_name", "lease_owner")
    of_searches = [*(sa.Column(name, sa.String()) for name in texts), sa.Column("lease_expires_at", sa.Double())]
    of_trials = [sa.Column(name, sa.String()) for name in ("node", "autofit_version")]
    return {
        "searches": [*of_searches, *counters],
        "trials": [*of_trials, sa.Column("search_epoch", sa.Integer())],
    }


def _rebuild() -> None:
    """The table as before, but for what may be null: SQLite cannot change that in place."""
    op.execute("PRAGMA defer_foreign_keys = ON")  # trials refer to the searches, which are there again at the end
    op.execute("CREATE TEMPORARY TABLE kept AS SELECT * FROM searches")
    op.drop_table("searches")
    op.create_table(
        "searches",
        sa.Column("search_id", sa.String, nullable=False),
        *(sa.Column(name, sa.String) for name in _UNKNOWN_AT_FIRST),
        sa.Column("workload_key", sa.String, nullable=False),
        *(sa.Column(name, sa.String, nullable=name == "ended_at") for name in ("status", "started_at", "ended_at")),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("result", sa.JSON),
        sa.PrimaryKeyConstraint("search_id", name="pk_searches"),
        *(
            sa.ForeignKeyConstraint([name], [target], name=f"fk_searches_{name}")
            for name, target in {**_UNKNOWN_AT_FIRST, "workload_key": "workloads.key"}.items()
        ),
    )
    op.execute(
        "INSERT INTO searches SELECT search_id, hardware_digest, stack_key, workload_key, status, started_at, "
        "ended_at, request, result FROM kept"
    )
    op.execute("DROP TABLE kept")
