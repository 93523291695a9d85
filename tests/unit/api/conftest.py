"""A client of the real application over a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from unit.store.conftest import migrated, postgresql_server, postgresql_url, sqlite_url, url

from autofit.api.app import create_app
from autofit.store import Store
from tests.made_stores import put

__all__ = ["migrated", "postgresql_server", "postgresql_url", "sqlite_url", "url"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A SQLite store with ten trials."""
    put(tmp_path / "store.db", filled=True)
    with Store.open(str(tmp_path / "store.db")) as opened:
        yield opened


@pytest.fixture
def client(store: Store) -> Iterator[TestClient]:
    """A client of a server without a token."""
    with TestClient(create_app(store), raise_server_exceptions=False) as opened:
        yield opened
