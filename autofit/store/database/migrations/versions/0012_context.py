"""An index of each context's trials in their order, with what tells which may be on a frontier."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

_COLUMNS = (
    *("workload_key", "hardware_key", "stack_key", "id", "config_key", "outcome", "stopped_early", "family"),
    *("device_bytes", "tokens_per_second", "memory_limit_bytes"),
)


def upgrade() -> None:
    """Replaces the index in the order of memory; counts from now on what is set aside in a context."""
    op.drop_index("ix_trials_frontier", "trials")
    op.create_index("ix_trials_context", "trials", _COLUMNS)
    op.add_column("contexts", sa.Column("set_asides", sa.Integer, nullable=False, server_default="0"))
