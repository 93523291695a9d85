"""A version for each context, which answers over HTTP carry; tokens for those who ask, and what they have started."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Adds the tables; every context of earlier trials has version 1."""
    keys = ("hardware_key", "stack_key", "workload_key")
    op.create_table(
        "contexts",
        *(sa.Column(name, sa.String, nullable=False) for name in keys),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("last_trial_id", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint(*keys, name="pk_contexts"),
    )
    columns = ", ".join(keys)
    op.execute(f"INSERT INTO contexts SELECT {columns}, 1, max(id) FROM trials GROUP BY {columns}")
    op.create_table(
        "tokens",
        sa.Column("name", sa.String, nullable=False),
        sa.Column("scope", sa.String, nullable=False),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("created_at", sa.String, nullable=False),
        sa.Column("revoked_at", sa.String),
        sa.PrimaryKeyConstraint("name", name="pk_tokens"),
    )
    op.create_index("uq_tokens_digest", "tokens", ["digest"], unique=True)
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at", sa.String, nullable=False),
        sa.Column("token", sa.String, nullable=False),
        sa.Column("action", sa.String, nullable=False),
        sa.Column("search_id", sa.String, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
        sa.ForeignKeyConstraint(["search_id"], ["searches.search_id"], name="fk_audit_search_id"),
    )
    op.create_index("ix_audit_search_id", "audit", ["search_id"])
