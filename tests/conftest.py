"""What all tests share."""

from __future__ import annotations

import gc
import subprocess
import sys
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


@pytest.fixture(scope="session")
def compiled_adam() -> None:
    """DeepSpeed's Adam for processors, which takes a minute where it is not compiled yet: by a process of its own,
    because who has compiled it has it loaded."""
    from autofit.training import native_ops

    hindrance = native_ops.obstacle("cpu_adam")
    if hindrance is not None:
        pytest.skip(str(hindrance))
    if not native_ops.is_built("cpu_adam"):
        build = "from autofit.training import native_ops; native_ops.build('cpu_adam')"
        subprocess.run([sys.executable, "-c", build], check=True)
