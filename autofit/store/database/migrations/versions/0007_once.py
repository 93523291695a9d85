"""Each trial is stored once, however often its write is tried; the latest of one hardware are found by an index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Adds what tells one write from another; drops a column that nothing reads."""
    op.add_column("trials", sa.Column("uid", sa.String))
    op.create_index("ix_trials_uid", "trials", ["uid"], unique=True)
    op.create_index("ix_trials_hardware", "trials", ["hardware_key", "id"])
    op.drop_column("trials", "method")
