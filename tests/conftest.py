"""What all tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A busy machine is no failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session", autouse=True)
def no_store_of_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What names no store finds and fills one of the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOFIT_STORE", str(tmp_path_factory.mktemp("store") / "default.db"))
        yield


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage() -> None:
    """Collections pass over what is there by now: torch and transformers are a million objects, which trainers and
    measurements look through each time."""
    gc.freeze()
