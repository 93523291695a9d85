"""The schema's history, one revision a file, for Alembic."""
