"""A client of the real application over a real store, of each kind in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from fastapi.testclient import TestClient
from unit.operations.made_trials import fill

from autofit.api.app import create_app
from autofit.store import Store
from tests.made_stores import put


@pytest.fixture(scope="session")
def migrated(postgresql_server: str, migrated: str) -> str:
    """The name of a PostgreSQL database with ten trials."""
    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE filled TEMPLATE {migrated}")  # type: ignore[arg-type]
    with Store.open(postgresql_server.replace("/postgres?", "/filled?")) as store:
        fill(store)
    return "filled"


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a SQLite file with ten trials."""
    put(tmp_path / "store.db", filled=True)
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """A store with ten trials on one card."""
    with Store.open(url) as opened:
        yield opened


@pytest.fixture
def client(store: Store) -> Iterator[TestClient]:
    """A client of a server without a token."""
    with TestClient(create_app(store), raise_server_exceptions=False) as opened:
        yield opened
