"""Connections to a store's database: how they are set up, and how reading and writing begin and end."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event

from autofit.core.errors import StoreError
from autofit.store.database.address import Address
from autofit.store.database.failures import may_pass, retried, translated

BUSY_SECONDS = 30.0
"""How long a SQLite connection waits for another's lock; `?timeout=SECONDS` in the URL changes it."""
LOCK = 0x6175746F666974
""""autofit" in ASCII: PostgreSQL's advisory locks are numbers. Whoever migrates has it alone, writers share it."""
ROWS_AT_ONCE = 1000
"""Read or written by one statement: far below the number of parameters that it may have (SQLite: 32,766), yet enough to
keep statements few."""

T = TypeVar("T")


def to_text(value: object) -> str:
    """`value` as JSON text; raises `ValueError` for NaN and infinity, which JSON does not have."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


class Database:
    """A store's database. Threads may share it; a forked child must not use its parent's."""

    def __init__(self, address: Address) -> None:
        self.address = address
        with translated(address):
            self.engine = _sqlite(address) if address.is_sqlite else _postgresql(address)
        # PostgreSQL must be told to show all statements of a read the same state, SQLite that a write begins.
        read_options = {} if address.is_sqlite else {"isolation_level": "REPEATABLE READ"}
        write_options = {"begin": "BEGIN IMMEDIATE"} if address.is_sqlite else {}
        self._reader = self.engine.execution_options(**read_options)
        self._writer = self.engine.execution_options(**write_options)
        self.revision: str | None = None
        """The schema that every transaction must find: another program may upgrade it meanwhile. None: any."""

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection whose statements all see the same state of the store; raises `StoreError`."""
        with translated(self.address), self._reader.connect() as connection:
            self._check(connection)
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A connection whose changes are all committed at the end, or none; raises `StoreError`."""
        with translated(self.address), self._writer.begin() as connection:
            self._check(connection, writes=True)
            yield connection

    def fetch(self, work: Callable[[Connection], T]) -> T:
        """Returns what `work` reads; calls it again after an error that passes. Raises `StoreError`."""
        return self._with_retries(self._reader.connect, work)

    def commit(self, work: Callable[[Connection], T]) -> T:
        """Commits the changes of `work` and returns its result; calls it again if another process came first, or if the
        connection was lost, perhaps after the changes were committed. Raises `StoreError`."""
        return self._with_retries(self._writer.begin, work, writes=True)

    def _with_retries(
        self,
        connect: Callable[[], AbstractContextManager[Connection]],
        work: Callable[[Connection], T],
        *,
        writes: bool = False,
    ) -> T:
        def attempt() -> T:
            with connect() as connection:
                self._check(connection, writes=writes)
                return work(connection)

        with translated(self.address):
            # About what a server takes to restart; writers that conflict need less.
            return retried(attempt, may_pass, seconds=10.0, pause_seconds=0.1)

    def _check(self, connection: Connection, *, writes: bool = False) -> None:
        """Raises `StoreError` if the schema is no longer the one that this program reads and writes."""
        if self.revision is None:
            return
        if writes and not self.address.is_sqlite:  # where a writer is alone anyway
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock_shared({LOCK})")
        revision = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
        if revision != self.revision:
            raise StoreError(
                f"the store {self.address} now has schema {revision}, and this program began with {self.revision}",
                remedy="start it again, in the version that changed the store",
            )

    def close(self) -> None:
        self.engine.dispose()


def _from_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise StoreError(f"the store holds text that is not JSON: {error}", remedy="restore it from a backup") from None


def _engine(address: Address, **options: Any) -> Engine:
    # On top of the pool's five, as many connections as a server has threads that answer (Starlette's limit is 40).
    options |= {"max_overflow": 35}
    return create_engine(address.url, json_serializer=to_text, json_deserializer=_from_text, **options)


def _postgresql(address: Address) -> Engine:
    connect = {} if "connect_timeout" in address.url.query else {"connect_timeout": 10}
    # A search may outlast a server's time limit for idle connections: each one is tested before use.
    return _engine(address, pool_pre_ping=True, connect_args=connect)


def _sqlite(address: Address) -> Engine:
    wait = {} if "timeout" in address.url.query else {"timeout": BUSY_SECONDS}
    engine = _engine(address, connect_args=wait)

    @event.listens_for(engine, "do_connect")
    def connect(_dialect: Any, _record: Any, args: list[Any], options: dict[str, Any]) -> sqlite3.Connection:
        return _open_sqlite(address, args, options)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A reader that becomes a writer cannot wait for the lock, so writers declare themselves at once.
        connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))

    return engine


def _open_sqlite(address: Address, args: list[Any], options: dict[str, Any]) -> sqlite3.Connection:
    connection: sqlite3.Connection = sqlite3.connect(*args, **options)
    try:
        connection.execute("PRAGMA schema_version").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        if not _is_at_rest(address, error):
            raise
        uri = f"file:{quote(str(address.path))}?mode=ro&immutable=1"
        connection = sqlite3.connect(uri, **{**options, "uri": True})
    # Only the engine's `begin` starts transactions: the driver would start them too late.
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys = ON")
    # A trial reported as kept must survive a power failure: NORMAL would sync the log only now and then.
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _is_at_rest(address: Address, error: sqlite3.OperationalError) -> bool:
    """Whether the file fails to open only because its folder is read-only, and nobody is writing to it."""
    name = str(error.sqlite_errorname)
    if address.path is None or not name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
        return False
    log = address.path.with_name(address.path.name + "-wal")
    return os.access(address.path, os.R_OK) and not (log.exists() and log.stat().st_size)
