"""Fixtures that the tests of operations share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.operations.made_world import World

from autofit.store import Store
from tests.made_stores import put


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Workers without a device."""
    return World.in_place_of_workers(monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """The file of `store`."""
    return str(tmp_path / "store.db")


@pytest.fixture
def store(path: str) -> Iterator[Store]:
    """An empty store."""
    put(Path(path))
    with Store.open(path) as opened:
        yield opened
