"""Where a store is: how a user may write its address, and how messages show it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_data_path
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from autofit.core.errors import UsageError

ENVIRONMENT = "AUTOFIT_STORE"
"""The environment variable that names the store if the command line does not."""

_SUFFIXES = (".db", ".sqlite", ".sqlite3")
_DRIVERS = {
    "sqlite": "sqlite+pysqlite",
    "sqlite+pysqlite": "sqlite+pysqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
_HOW = "write a path ending in .db, sqlite:///PATH, or postgresql://USER@HOST/DATABASE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A store's address, parsed."""

    url: URL
    """The URL, with the driver to use."""
    path: Path | None
    """The database file; None for PostgreSQL, and for SQLite's own `file:` URIs."""

    @classmethod
    def of(cls, text: str | None) -> Address:
        """The address that `text` spells; None stands for AUTOFIT_STORE or else the user's data folder. Raises
        `UsageError` for anything but a database file or a SQLite or PostgreSQL URL."""
        if text == "":
            # Most likely an unset variable in a script, whose trials would go where nobody looks for them.
            raise UsageError(f"the store's name is empty: {_HOW}")
        text = text or os.environ.get(ENVIRONMENT)
        if not text:
            return cls._file(user_data_path("autofit") / "autofit.db")
        if "://" not in text:
            if not text.endswith(_SUFFIXES):
                raise UsageError(f"store {text!r} is not understood: {_HOW}")
            return cls._file(Path(text).expanduser())
        try:
            url = make_url(text)
        except (ArgumentError, ValueError):
            # The URL is not repeated: even if it cannot be parsed, it may hold a password.
            raise UsageError(f"the store's URL is not understood: {_HOW}") from None
        driver = _DRIVERS.get(url.drivername)
        if driver is None:
            raise UsageError(f"store of kind {url.drivername!r} is not supported: {_HOW}")
        url = url.set(drivername=driver)
        return cls._sqlite(url) if driver.startswith("sqlite") else cls(url=url, path=None)

    @classmethod
    def _sqlite(cls, url: URL) -> Address:
        database = url.database
        if not database or ":memory:" in database or url.query.get("mode") == "memory":
            raise UsageError(f"a store in memory would be lost at the end: {_HOW}")
        if database.startswith("file:"):
            return cls(url=url, path=None)
        path = Path(database).expanduser()
        return cls(url=url.set(database=str(path)), path=path)

    @classmethod
    def _file(cls, path: Path) -> Address:
        return cls(url=URL.create("sqlite+pysqlite", database=str(path)), path=path)

    @property
    def is_sqlite(self) -> bool:
        """Whether the store is a SQLite file rather than a PostgreSQL database."""
        return self.url.drivername.startswith("sqlite")

    def __str__(self) -> str:
        """The address as messages name it, without any password."""
        if self.is_sqlite:
            return self.url.database or ""
        host = self.url.host or str(self.url.query.get("host", "localhost"))
        port = f":{self.url.port}" if self.url.port else ""
        return f"postgresql://{host}{port}/{self.url.database or ''}"
