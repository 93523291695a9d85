"""What tests of operations share."""

from __future__ import annotations

import pytest
from unit.operations.made_world import World

from autofit.operations import foreseeing, searching


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Workers without a device."""
    made = World()
    monkeypatch.setattr(searching, "open_pool", made.open_pool)
    monkeypatch.setattr(foreseeing, "predict_all", lambda *asked, **options: made.predict_all(*asked, **options))
    return made
