"""Every trial ever measured, in SQLite or PostgreSQL. Only this package imports SQLAlchemy and Alembic."""

from autofit.store.access import OPERATOR, SCOPES, Audited, Token
from autofit.store.database.schema import NoStore, StoreReport, check, place, upgrade
from autofit.store.exchange import ImportReport, export_lines, import_lines, line_of, opening_line, read_lines
from autofit.store.searches.heartbeat import Heartbeat
from autofit.store.searches.lease import Lease, LeaseLost, UnderWay, new_owner
from autofit.store.searches.queue import Event, KeyReused, QueueFull, QueueStatus
from autofit.store.searches.search import ENDINGS, Search
from autofit.store.store import Store

__all__ = [
    "ENDINGS",
    "OPERATOR",
    "SCOPES",
    "Audited",
    "Event",
    "Heartbeat",
    "ImportReport",
    "KeyReused",
    "Lease",
    "LeaseLost",
    "NoStore",
    "QueueFull",
    "QueueStatus",
    "Search",
    "Store",
    "StoreReport",
    "Token",
    "UnderWay",
    "check",
    "export_lines",
    "import_lines",
    "line_of",
    "new_owner",
    "opening_line",
    "place",
    "read_lines",
    "upgrade",
]
