"""What a user may write for a store, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.core.errors import UsageError
from autofit.store import Store
from autofit.store.database.address import Address


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets the user's own store."""
    monkeypatch.delenv("AUTOFIT_STORE", raising=False)


@pytest.mark.parametrize(
    ("text", "driver", "database"),
    [
        ("results.db", "sqlite+pysqlite", "results.db"),
        ("/data/results.sqlite", "sqlite+pysqlite", "/data/results.sqlite"),
        ("100%.db", "sqlite+pysqlite", "100%.db"),
        ("sqlite:///results", "sqlite+pysqlite", "results"),
        ("sqlite:////data/results", "sqlite+pysqlite", "/data/results"),
        ("postgresql://me@db/autofit", "postgresql+psycopg", "autofit"),
        ("postgres://me@db/autofit", "postgresql+psycopg", "autofit"),
        ("postgresql+psycopg://me@db/autofit", "postgresql+psycopg", "autofit"),
    ],
)
def test_understands(text: str, driver: str, database: str) -> None:
    address = Address.of(text)
    assert address.url.drivername == driver
    assert address.url.database == database
    assert address.is_sqlite == (address.path is not None)


@pytest.mark.parametrize(
    "text",
    [
        "results",
        "results.json",
        "mysql://me:secret@db/autofit",
        "postgresql+psycopg2://me:secret@db/autofit",
        "postgresql://me:secret@db:port/autofit",
        "://",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:x?mode=memory&uri=true",
    ],
)
def test_refuses(text: str) -> None:
    with pytest.raises(UsageError, match=r"path ending in \.db") as refused:
        Address.of(text)
    assert "secret" not in str(refused.value)


def test_a_password_is_never_shown() -> None:
    address = Address.of("postgresql://me:secret@db.example:5433/autofit?password=secret&sslmode=require")
    assert str(address) == "postgresql://db.example:5433/autofit"
    assert str(Address.of("postgresql:///autofit?host=/run/pg")) == "postgresql:///run/pg/autofit"


def test_defaults_to_the_environment_then_to_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with Store.open() as store:
        assert Path(str(store)).name == "autofit.db"
        assert Path(str(store)).is_file()
    monkeypatch.setenv("AUTOFIT_STORE", str(tmp_path / "named.db"))
    with Store.open() as store:
        assert str(store) == str(tmp_path / "named.db")
    monkeypatch.setenv("AUTOFIT_STORE", "")
    assert str(Address.of(None)).endswith("autofit.db")


def test_makes_the_folders_of_a_new_store(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "a" / "b#?%" / "store.db")):
        pass
    assert (tmp_path / "a" / "b#?%" / "store.db").is_file()
