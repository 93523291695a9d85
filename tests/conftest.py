"""What all tests share."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The many processes that tests start are to find compiled modules, as those of an installed program do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A busy machine is no failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


TESTS = Path(__file__).parent
NEEDS_THE_MACHINE = (
    "end_to_end",
    "unit/benchmarks",
    "unit/cli/test_trial_command.py",
    "unit/estimate/test_rank_shards.py",
    "unit/export/test_export_two_ranks.py",
    "unit/trial",
    "unit/training",
    "unit/workers",
)
"""Tests that train in processes of their own, or look at what these leave behind: never two at once."""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run on several workers: one after the other what needs the machine, module by module the rest."""
    for item in items:
        alone = any(item.path.is_relative_to(TESTS / part) for part in NEEDS_THE_MACHINE)
        item.add_marker(pytest.mark.xdist_group("machine" if alone else str(item.path)))


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
