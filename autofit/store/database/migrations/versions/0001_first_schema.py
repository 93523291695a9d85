"""The first schema: hardware, stacks, workloads, searches and trials."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Creates the tables."""
    _create_values()
    op.create_table(
        "searches",
        sa.Column("search_id", sa.String, nullable=False),
        sa.Column("hardware_digest", sa.String, nullable=False),
        sa.Column("stack_key", sa.String, nullable=False),
        sa.Column("workload_key", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("started_at", sa.String, nullable=False),
        sa.Column("ended_at", sa.String),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("result", sa.JSON),
        sa.PrimaryKeyConstraint("search_id", name="pk_searches"),
        *_references("searches"),
    )
    _create_trials()


def _references(table: str) -> list[sa.ForeignKeyConstraint]:
    targets = (
        ("hardware_digest", "hardware.digest"),
        ("stack_key", "stacks.key"),
        ("workload_key", "workloads.key"),
    )
    return [sa.ForeignKeyConstraint([column], [target], name=f"fk_{table}_{column}") for column, target in targets]


def _create_values() -> None:
    op.create_table(
        "hardware",
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("key", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_hardware"),
    )
    op.create_index("ix_hardware_key", "hardware", ["key"])
    op.create_table(
        "stacks",
        sa.Column("key", sa.String, nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_stacks"),
    )
    op.create_table(
        "workloads",
        sa.Column("key", sa.String, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_workloads"),
    )
    op.create_index("ix_workloads_model", "workloads", ["model"])


def _create_trials() -> None:
    identity = ["hardware_key", "stack_key", "workload_key", "config_key", "memory_limit_bytes", "attempt"]
    op.create_table(
        "trials",
        sa.Column("id", _ID, nullable=False),
        sa.Column("hardware_digest", sa.String, nullable=False),
        sa.Column("hardware_key", sa.String, nullable=False),
        sa.Column("stack_key", sa.String, nullable=False),
        sa.Column("workload_key", sa.String, nullable=False),
        sa.Column("config_key", sa.String, nullable=False),
        sa.Column("memory_limit_bytes", sa.BigInteger, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("search_id", sa.String),
        sa.Column("method", sa.String, nullable=False),
        sa.Column("family", sa.String, nullable=False),
        sa.Column("outcome", sa.String, nullable=False),
        sa.Column("device_bytes", sa.BigInteger),
        sa.Column("peak_allocated_bytes", sa.BigInteger),
        sa.Column("tokens_per_second", sa.Double),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("recorded_at", sa.String, nullable=False),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("evidence", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_trials"),
        sa.UniqueConstraint(*identity, name="uq_trials_attempt"),
        sa.ForeignKeyConstraint(["search_id"], ["searches.search_id"], name="fk_trials_search_id"),
        *_references("trials"),
    )
    op.create_index("ix_trials_search_id", "trials", ["search_id"])
    op.create_index(
        "ix_trials_frontier",
        "trials",
        [
            "workload_key",
            "hardware_key",
            "stack_key",
            "outcome",
            "config_key",
            "id",
            "family",
            "device_bytes",
            "tokens_per_second",
        ],
    )
