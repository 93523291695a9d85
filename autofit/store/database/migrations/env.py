"""Runs migrations on the connection that the store passes in, within its transaction: all of them or none."""

from __future__ import annotations

from alembic import context

from autofit.store.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    # SQLite cannot alter most of a table in place: Alembic copies it instead.
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
