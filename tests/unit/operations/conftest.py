"""Fixtures that the tests of operations share."""

from __future__ import annotations

import pytest
from unit.operations.made_world import World


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Workers without a device."""
    return World.in_place_of_workers(monkeypatch)
