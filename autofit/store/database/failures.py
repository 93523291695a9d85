"""Errors of database drivers: each as one clear line with a remedy, and which of them may pass."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from autofit.core.errors import StoreError, lines_of
from autofit.store.database.address import Address

T = TypeVar("T")

_LOCKED = "is locked by another process"
_LATER = "run the command again when that process has ended"
_NAME_ANOTHER = "or name another store with --store or AUTOFIT_STORE"

_Meanings = tuple[tuple[tuple[str, ...], str, str], ...]
"""Prefixes of error codes, what is wrong with the store, and the remedy; the first match counts."""

# Names of result codes: sqlite.org/rescode.html.
_SQLITE: _Meanings = (
    (("SQLITE_BUSY", "SQLITE_LOCKED"), _LOCKED, _LATER),
    (
        ("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH"),
        "is read-only",
        f"make the file and its folder writable, {_NAME_ANOTHER}",
    ),
    (
        ("SQLITE_CANTOPEN",),
        "cannot be opened",
        f"check that the file and its folder exist and are yours to read and write, {_NAME_ANOTHER}",
    ),
    (
        ("SQLITE_CORRUPT", "SQLITE_NOTADB"),
        "is damaged or is not a SQLite database",
        f"put a backup or an import of `autofit db export` in its place, {_NAME_ANOTHER}",
    ),
    (
        ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE"),
        "has no disk space left",
        f"free some space, {_NAME_ANOTHER}",
    ),
    (("SQLITE_IOERR",), "has a disk error", f"check the disk, {_NAME_ANOTHER}"),
)

# SQLSTATE: postgresql.org/docs/current/errcodes-appendix.html.
_POSTGRESQL: _Meanings = (
    (("28",), "rejects this user or password", "check user and password in the store's URL"),
    (("3D",), "does not exist on this server", "create the database: createdb NAME"),
    (("42501",), "does not permit this to its user", "ask its owner for the right to use and create tables"),
    (("25006",), "is read-only", f"connect to the primary server, {_NAME_ANOTHER}"),
    (("53100",), "has no disk space left", "free some space on the database server"),
    (("53300",), "accepts no more connections", "close other clients, or raise the server's max_connections"),
    (("55P03", "57014", "40"), _LOCKED, _LATER),
    (("XX001", "XX002"), "is damaged", "restore it from a backup, or import what `autofit db export` wrote"),
    (("08", "57P"), "cannot be reached", "check that the server runs, and host and port in the store's URL"),
)

# libpq gives no SQLSTATE for failures before a session exists.
_AT_CONNECT = (
    ("authentication", "28"),
    ("no pg_hba.conf entry", "28"),
    ("role ", "28"),
    ("does not exist", "3D"),
    ("too many", "53300"),
)


def store_error(error: Exception, address: Address) -> StoreError:
    """What `error`, from SQLAlchemy or a driver, means for the store at `address`."""
    cause: BaseException = error
    if isinstance(error, DBAPIError) and error.orig is not None:
        cause = error.orig
    message = lines_of(cause)[0]
    if address.is_sqlite:
        meanings, code = _SQLITE, str(getattr(cause, "sqlite_errorname", None) or "")
    else:
        meanings, code = _POSTGRESQL, _sqlstate(error, cause)
    for prefixes, meaning, remedy in meanings:
        if code.startswith(prefixes):
            detail = "" if address.is_sqlite else f": {message}"
            return StoreError(f"the store {address} {meaning}{detail}", remedy=remedy)
    return StoreError(f"the store {address} fails: {message}", remedy="look at it with `autofit db check`")


def _sqlstate(error: Exception, cause: BaseException) -> str:
    state = getattr(cause, "sqlstate", None)
    if state is not None:
        return str(state)
    for words, code in _AT_CONNECT:
        if words in str(cause):
            return code
    lost = isinstance(error, DBAPIError) and (error.connection_invalidated or error.statement is None)
    return "08" if lost else ""


def may_pass(error: Exception) -> bool:
    """Whether trying again may succeed: another process wrote the same rows at the same time, or the connection to a
    server was lost or refused, which may be restarting."""
    if not isinstance(error, DBAPIError) or error.orig is None:
        return False
    if isinstance(error.orig, sqlite3.Error):
        name = getattr(error.orig, "sqlite_errorname", None)
        return name in ("SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY", "SQLITE_BUSY_SNAPSHOT")
    return _sqlstate(error, error.orig).startswith(("23505", "40001", "40P01", "08", "57P"))


@contextmanager
def translated(address: Address) -> Iterator[None]:
    """Turns every error of SQLAlchemy and its drivers into a `StoreError`; leaves all others alone."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise store_error(error, address) from None


def retried(work: Callable[[], T], passes: Callable[[Exception], bool], *, seconds: float, pause_seconds: float) -> T:
    """The result of `work`, which is called again after an error that passes, for so many seconds from then on. The
    pauses vary, so that processes that met do not meet again."""
    deadline: float | None = None  # waiting for a lock comes before the first failure, and is not counted
    while True:
        try:
            return work()
        except Exception as error:
            deadline = time.monotonic() + seconds if deadline is None else deadline
            if not passes(error) or time.monotonic() + pause_seconds > deadline:
                raise
        time.sleep(random.uniform(0.1, 1.9) * pause_seconds)
