"""Every trial ever measured, in SQLite or PostgreSQL. Only this package imports SQLAlchemy and Alembic."""

from autofit.store.exchange import ImportReport, export_lines, import_lines
from autofit.store.schema import StoreReport, check, upgrade
from autofit.store.searches import Search
from autofit.store.store import Store

__all__ = [
    "ImportReport",
    "Search",
    "Store",
    "StoreReport",
    "check",
    "export_lines",
    "import_lines",
    "upgrade",
]
