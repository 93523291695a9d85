"""Without the columns of trials that nothing reads: what they repeat is part of the evidence."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Drops the columns."""
    for column in ("transient", "deadline_seconds", "peak_allocated_bytes"):
        op.drop_column("trials", column)
