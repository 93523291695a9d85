"""Measured rates of devices."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Adds the table."""
    op.create_table(
        "probes",
        sa.Column("hardware_key", sa.String, nullable=False),
        sa.Column("stack_key", sa.String, nullable=False),
        sa.Column("shapes_key", sa.String, nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
        sa.Column("recorded_at", sa.String, nullable=False),
        sa.PrimaryKeyConstraint("hardware_key", "stack_key", "shapes_key", name="pk_probes"),
    )
