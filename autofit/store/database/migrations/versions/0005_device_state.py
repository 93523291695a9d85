"""The state of the device beside each trial, and whether its time can be trusted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Adds the columns."""
    op.add_column("trials", sa.Column("device_state", sa.JSON))
    op.add_column("trials", sa.Column("suspect", sa.Boolean, server_default=sa.false(), nullable=False))
