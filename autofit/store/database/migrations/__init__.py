"""The schema's history for Alembic, one revision per file."""
