"""What all tests share."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# The many processes that tests start are to find compiled modules, as those of an installed program do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Several processes test at once: NumPy's threads would wait busily for cores that others have.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A busy machine is no failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


NEEDS_THE_MACHINE = (
    "tests/end_to_end/",
    "tests/unit/benchmarks/",
    "tests/unit/cli/test_ranks_commands.py",
    "tests/unit/cli/test_trial_command.py",
    "tests/unit/estimate/test_rank_shards.py",
    "tests/unit/export/test_export_transformers_trains.py",
    "tests/unit/export/test_export_two_ranks.py",
    "tests/unit/trial/",
    "tests/unit/training/test_engines.py",
    "tests/unit/training/test_nvme_trains.py",
    "tests/unit/workers/",
)
"""Tests that train in processes of their own, or look at what these leave behind: never two at once."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run on several workers: one after the other what needs the machine, module by module the rest."""
    from xdist.scheduler import LoadScopeScheduling

    class ByNeed(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "machine" if nodeid.startswith(NEEDS_THE_MACHINE) else nodeid.partition("::")[0]

    return ByNeed(config, log)


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
