"""What all tests share."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings

# A busy machine is no failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage() -> None:
    """Collections pass over what is there by now: torch and transformers are a million objects, which trainers and
    measurements look through each time."""
    gc.freeze()
