"""The schema's revision: creating a new store, refusing one of another schema, upgrading, checking."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, MetaData, Table, func, inspect, select, text

from autofit import __version__
from autofit.core.document import Document
from autofit.core.errors import StoreError
from autofit.core.verdict import Contradiction, contradiction
from autofit.store import ranking
from autofit.store.database.address import Address
from autofit.store.database.engine import BUSY_SECONDS, LOCK, Database
from autofit.store.database.failures import retried, translated
from autofit.store.rows import Reader
from autofit.store.tables import TABLES

_SCRIPTS = Path(__file__).parent / "migrations"
REVISIONS = tuple(sorted(script.name[:4] for script in _SCRIPTS.glob("versions/[0-9]*.py")))
"""Every revision, oldest first. Opening a store compares with these, which avoids importing Alembic."""

_VERSIONS = "alembic_version"
# Alembic keeps the migration in progress in a global variable.
_MIGRATING = threading.Lock()


class NoStore(StoreError):
    """There is no store at the address, and none was to be created."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport(Document):
    """What `autofit db check` found."""

    store: str
    """Where the store is, without any password."""
    kind: str
    """`sqlite` or `postgresql`."""
    revision: str | None
    """The store's schema; None if the database is empty or damaged."""
    newest: str
    """The schema that this autofit reads and writes."""
    problems: tuple[str, ...]
    """What is wrong, one line each."""
    counts: dict[str, int]
    """Rows of each table."""
    contradictions: tuple[Contradiction, ...] = ()
    """Configs whose trials contradict each other: this is not damage; the cautious reading is used."""

    def to_json(self) -> dict[str, Any]:
        return {**Document.to_json(self), "sound": self.sound}

    @property
    def sound(self) -> bool:
        """Whether the store can be used as it is."""
        return not self.problems and self.revision == self.newest


def prepare(database: Database, *, create: bool) -> None:
    """Makes sure that the database has the newest schema; creates it in an empty one if `create` is set. Raises
    `StoreError` for every other database."""
    _find_file(database.address, create=create)
    with database.read() as connection:
        state = _schema_state(connection)
    if state.revision != REVISIONS[-1]:
        if not (state.is_empty and create):
            raise _refusal(state, database.address)
        _migrate(database)
    database.revision = REVISIONS[-1]


def upgrade(url: str | None = None) -> str:
    """Upgrades the store to the newest schema, all or nothing, or creates it; returns the revision. Raises
    `StoreError`, also for a store of a newer autofit, which is left as it is."""
    with _opened(url, create=True) as database:
        with database.read() as connection:
            state = _schema_state(connection)
        if not state.is_empty and state.revision not in REVISIONS:
            raise _refusal(state, database.address)
        _migrate(database)
    return REVISIONS[-1]


def check(url: str | None = None) -> StoreReport:
    """Examines a store without changing it: its schema, its integrity where SQLite can tell, its rows, and which of its
    trials contradict each other. Raises `StoreError` if it cannot even be read."""
    with _opened(url, create=False) as database, database.read() as connection:
        problems = _damage(connection) if database.address.is_sqlite else []
        # Reading the tables of a damaged file would fail again.
        state = None if problems else _schema_state(connection)
        if state and state.revision != REVISIONS[-1]:
            problems.append(str(_refusal(state, database.address)))
        current = state is not None and state.revision == REVISIONS[-1]
        return StoreReport(
            store=str(database.address),
            kind=connection.dialect.name,
            revision=state.revision if state else None,
            newest=REVISIONS[-1],
            problems=tuple(problems),
            counts=_counts(connection, state.tables) if state else {},
            contradictions=_contradictions(connection) if current else (),
        )


def check_schema(url: str | None = None) -> str:
    """The store's revision, which is the newest. No other table is read: a migration may have them. Raises `StoreError`
    if there is no store, or one of another schema."""
    with _opened(url, create=False) as database:
        prepare(database, create=False)
    return REVISIONS[-1]


def place(url: str | None = None) -> Path | None:
    """The file of a SQLite store, whether or not it exists; None for a server. Raises `UsageError`."""
    return Address.of(url).path


@dataclass(frozen=True, slots=True, kw_only=True)
class _SchemaState:
    revision: str | None
    tables: frozenset[str]
    is_empty: bool


@contextmanager
def _opened(url: str | None, *, create: bool) -> Iterator[Database]:
    address = Address.of(url)
    _find_file(address, create=create)
    with closing(Database(address)) as database:
        yield database


def _find_file(address: Address, *, create: bool) -> None:
    """Creates the folder of a missing file. Without `create` it raises, because SQLite would create an empty file."""
    if address.path is None or address.path.exists():
        return
    if not create:
        raise _absent(address)
    try:
        address.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"the store's folder {address.path.parent} cannot be created: {error.strerror}",
            remedy="name another store with --store or AUTOFIT_STORE",
        ) from None


def _schema_state(connection: Connection) -> _SchemaState:
    tables = frozenset(inspect(connection).get_table_names())
    revision = None
    if _VERSIONS in tables:
        revision = connection.scalar(text(f"SELECT version_num FROM {_VERSIONS}"))
    # A server's database is often shared; a file with other tables belongs to another program.
    ours = tables if connection.dialect.name == "sqlite" else tables & {*TABLES, _VERSIONS}
    return _SchemaState(revision=revision, tables=tables, is_empty=not ours)


def _migrate(database: Database) -> None:
    from alembic import command
    from alembic.config import Config

    if database.address.is_sqlite:
        _use_log(database)
    with _MIGRATING, database.write() as connection:
        if not database.address.is_sqlite:
            connection.execute(text(f"SELECT pg_advisory_xact_lock({LOCK})"))
        if _schema_state(connection).revision == REVISIONS[-1]:
            return
        config = Config()
        config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _use_log(database: Database) -> None:
    """Turns on SQLite's write-ahead log, which lets readers continue alongside a writer and stays on for good."""

    def turn_on() -> None:
        with closing(database.engine.raw_connection()) as connection:
            connection.cursor().execute("PRAGMA journal_mode = WAL").close()

    def is_busy(error: Exception) -> bool:
        return str(getattr(error, "sqlite_errorname", "")).startswith("SQLITE_BUSY")

    with translated(database.address):
        # SQLite does not wait by itself here, and refuses this within a transaction.
        retried(turn_on, is_busy, seconds=BUSY_SECONDS, pause_seconds=0.05)


def _damage(connection: Connection) -> list[str]:
    lines = connection.scalars(text("PRAGMA integrity_check(20)"))
    damage = [" ".join(line.split()) for line in lines if line != "ok"]
    if damage:
        return damage
    broken = connection.execute(text("PRAGMA foreign_key_check")).fetchmany(20)
    return [f"row {number} of {table} refers to a row of {other} that is lost" for table, number, other, _ in broken]


def _contradictions(connection: Connection) -> tuple[Contradiction, ...]:
    results = (contradiction(attempts) for attempts in ranking.contradicting(connection, Reader()))
    return tuple(result for result in results if result is not None)


def _counts(connection: Connection, tables: frozenset[str]) -> dict[str, int]:
    ours = [Table(name, MetaData()) for name in TABLES if name in tables]
    return {t.name: connection.scalar(select(func.count()).select_from(t)) or 0 for t in ours}


def _absent(address: Address) -> NoStore:
    return NoStore(
        f"there is no store at {address}",
        remedy="run `autofit search` first (--dry-run predicts, without a device), or name another store "
        "with --store or AUTOFIT_STORE",
    )


def _refusal(state: _SchemaState, address: Address) -> StoreError:
    if state.is_empty:
        return _absent(address)
    if state.revision is None:
        return StoreError(
            f"the database at {address} holds tables of another program",
            remedy="name another store with --store or AUTOFIT_STORE",
        )
    if state.revision in REVISIONS:
        return StoreError(
            f"the store {address} has the older schema {state.revision}, this autofit uses {REVISIONS[-1]}",
            remedy="autofit db upgrade",
        )
    return StoreError(
        f"the store {address} has schema {state.revision}, newer than autofit {__version__} knows",
        remedy="use the version that wrote it, or another store (--store or AUTOFIT_STORE)",
    )
