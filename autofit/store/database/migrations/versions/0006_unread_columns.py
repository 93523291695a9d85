"""Without the columns of trials that nothing reads: what they repeat is part of the evidence."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Drops the columns."""
    for column in ("transient", "deadline_seconds", "peak_allocated_bytes"):
        op.drop_column("trials", column)


def downgrade() -> None:
    """Restores the schema as it was before, with nothing in the columns."""
    op.add_column("trials", sa.Column("peak_allocated_bytes", sa.BigInteger))
    op.add_column("trials", sa.Column("deadline_seconds", sa.Double))
    op.add_column("trials", sa.Column("transient", sa.Boolean, server_default=sa.false(), nullable=False))
