"""Predictions alongside measurements, and a cache of estimates."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Adds the column and the table."""
    op.add_column("trials", sa.Column("prediction", sa.JSON))
    op.create_table(
        "estimates",
        sa.Column("key", sa.String, nullable=False),
        sa.Column("estimate", sa.JSON, nullable=False),
        sa.Column("recorded_at", sa.String, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_estimates"),
    )
