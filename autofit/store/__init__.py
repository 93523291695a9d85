"""Every trial ever measured, in SQLite or PostgreSQL. Only this package imports SQLAlchemy and Alembic."""

from autofit.store.database.schema import NoStore, StoreReport, check, place, upgrade
from autofit.store.exchange import ImportReport, export_lines, import_lines, line_of, opening_line, read_lines
from autofit.store.searches import Search
from autofit.store.store import Store

__all__ = [
    "ImportReport",
    "NoStore",
    "Search",
    "Store",
    "StoreReport",
    "check",
    "export_lines",
    "import_lines",
    "line_of",
    "opening_line",
    "place",
    "read_lines",
    "upgrade",
]
