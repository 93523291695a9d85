"""Every trial ever measured, in SQLite or PostgreSQL. Only this package imports SQLAlchemy and Alembic."""

from autofit.store.access import OPERATOR as OPERATOR
from autofit.store.access import SCOPES as SCOPES
from autofit.store.access import Audited as Audited
from autofit.store.access import Token as Token
from autofit.store.database.schema import NoStore as NoStore
from autofit.store.database.schema import StoreReport as StoreReport
from autofit.store.database.schema import check as check
from autofit.store.database.schema import check_schema as check_schema
from autofit.store.database.schema import place as place
from autofit.store.database.schema import upgrade as upgrade
from autofit.store.exchange import ImportReport as ImportReport
from autofit.store.exchange import export_lines as export_lines
from autofit.store.exchange import import_lines as import_lines
from autofit.store.exchange import read_lines as read_lines
from autofit.store.searches.heartbeat import Heartbeat as Heartbeat
from autofit.store.searches.lease import Lease as Lease
from autofit.store.searches.lease import LeaseLost as LeaseLost
from autofit.store.searches.lease import UnderWay as UnderWay
from autofit.store.searches.lease import new_owner as new_owner
from autofit.store.searches.queue import Event as Event
from autofit.store.searches.queue import KeyReused as KeyReused
from autofit.store.searches.queue import QueueFull as QueueFull
from autofit.store.searches.search import ENDINGS as ENDINGS
from autofit.store.searches.search import Search as Search
from autofit.store.store import Store as Store
