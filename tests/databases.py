"""Both kinds of database, for any test: a new SQLite file, or a database of the session's one PostgreSQL server."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    """The URI of a real PostgreSQL server's database `postgres`."""
    # Not in pytest's own folder: started by root, the server runs as another user, whom any later pytest locks out.
    folder = tempfile.mkdtemp(prefix="autofit-postgresql-")
    with warnings.catch_warnings():
        # It warns about a runtime folder that containers do not have.
        warnings.simplefilter("ignore")
        from pgserver.postgres_server import get_server

        server = get_server(folder)
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        # Nothing here survives a crash of the machine. Databases are made and dropped for every test.
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            connection.execute(f"ALTER SYSTEM SET {setting} = off")  # type: ignore[arg-type]
        connection.execute("SELECT pg_reload_conf()")
    yield server.get_uri()
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def migrated(postgresql_server: str) -> str:
    """The name of a PostgreSQL database that has the schema, and nothing else."""
    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        connection.execute("CREATE DATABASE migrated")
    from autofit.store import Store

    Store.open(postgresql_server.replace("/postgres?", "/migrated?")).close()
    return "migrated"


@pytest.fixture
def postgresql_url(postgresql_server: str, migrated: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a PostgreSQL database: an empty one, or with the schema for a test that only asks for a store."""
    with a_database(postgresql_server, f"TEMPLATE {migrated}" if "store" in request.fixturenames else "") as url:
        yield url


@contextmanager
def a_database(server: str, options: str = "") -> Iterator[str]:
    """The URL of a new database of the PostgreSQL server, which is there no longer afterwards."""
    name = f"autofit_{uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} {options}")  # type: ignore[arg-type]
    yield server.replace("/postgres?", f"/{name}?")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[arg-type]


@pytest.fixture
def sqlite_url(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The URL of a SQLite file: one that does not exist yet, or with the schema for a test that only asks for a
    store."""
    if "store" in request.fixturenames:
        from tests.made_stores import put

        put(tmp_path / "store.db")
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database, of each kind in turn."""
    return str(request.getfixturevalue(f"{request.param}_url"))
