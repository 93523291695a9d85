"""Idempotency keys in a table of their own: whoever joins a search has one, too, and each token its own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Adds the table. A key of before belongs to each token that has asked for its search, or to none."""
    op.create_table(
        "idempotency_keys",
        *(sa.Column(name, sa.String, nullable=False) for name in ("token", "key", "digest", "search_id")),
        sa.PrimaryKeyConstraint("token", "key", name="pk_idempotency_keys"),
        sa.ForeignKeyConstraint(["search_id"], ["searches.search_id"], name="fk_idempotency_keys_search_id"),
    )
    op.execute(
        "INSERT INTO idempotency_keys "
        "SELECT DISTINCT coalesce(a.token, ''), s.idempotency_key, s.digest, s.search_id FROM searches s "
        "LEFT JOIN audit a ON a.search_id = s.search_id AND a.action = 'search' "
        "WHERE s.idempotency_key IS NOT NULL AND s.digest IS NOT NULL"
    )
    op.drop_index("uq_searches_idempotency_key", "searches")
    op.drop_column("searches", "idempotency_key")
