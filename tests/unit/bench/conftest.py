"""The worlds that searches are tested in."""

import gc

import pytest
from unit.search.conftest import job, lattice, truth

__all__ = ["job", "lattice", "truth"]


@pytest.fixture(autouse=True)
def no_collecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate collects garbage at every trial, which takes half a second with all libraries on the heap."""
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)
