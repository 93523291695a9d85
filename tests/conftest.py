"""Fixtures and settings that all tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from databases import migrated, postgresql_server, postgresql_url, sqlite_url, url
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from autofit.trial.process.group_runner import GroupRunner
    from autofit.trial.process.runner import TrialRunner

__all__ = ["migrated", "postgresql_server", "postgresql_url", "sqlite_url", "url"]

# The many processes that tests start should find compiled modules, as those of an installed program do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Several processes run tests at once: threads would busy-wait for cores that others occupy, which makes a trial of a
# second take ten on a busy machine. Read when torch and NumPy are loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# With Python's 700 new objects the collector takes a tenth of the time of what traces training steps.
gc.set_threshold(50_000)

# A slow example on a busy machine is not a failure, nor is one that takes long to draw.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


STARTS_RAY = (
    "tests/emulated_card/test_kinds_of_a_cluster.py",
    "tests/end_to_end/test_kills.py",
    "tests/end_to_end/test_search_command.py",
    "tests/end_to_end/test_service.py",
    "tests/end_to_end/test_slurm.py",
    "tests/unit/workers/",
)
"""Tests of the whole program and of Ray: never two at once."""
TRAINS = (
    "tests/end_to_end/test_users_program.py",
    "tests/unit/cli/test_ranks_commands.py",
    "tests/unit/cli/test_trial_command.py",
    "tests/unit/estimate/test_rank_shards.py",
    "tests/unit/export/test_export_transformers_trains.py",
    "tests/unit/export/test_export_two_ranks.py",
    "tests/unit/trial/",
    "tests/unit/training/test_engines.py",
    "tests/unit/training/test_nvme_trains.py",
)
"""Tests that train in processes of their own, or check what these leave behind: never two at once."""
SLOW = (
    *STARTS_RAY,
    *TRAINS,
    "tests/emulated_card/",
    "tests/end_to_end/",
    "tests/exports_in_own_environments/",
    "tests/contract/test_cli_snapshot.py",
    "tests/contract/test_documents.py",
    "tests/unit/bench/test_made_search.py",
    "tests/unit/bench/test_replay.py",
    "tests/unit/bench/test_replay_of_recorded_tables.py",
    "tests/unit/benchmarks/",
    "tests/unit/catalog/test_catalog_hub.py",
    "tests/unit/cli/test_bad_input.py",
    "tests/unit/cli/test_commands.py",
    "tests/unit/cli/test_dry_run_command.py",
    "tests/unit/cli/test_estimate_command.py",
    "tests/unit/cli/test_finding_out.py",
    "tests/unit/cli/test_packages_missing.py",
    "tests/unit/cli/test_store_commands.py",
    "tests/unit/estimate/test_bound.py",
    "tests/unit/estimate/test_cuda_kernels.py",
    "tests/unit/estimate/test_estimator.py",
    "tests/unit/estimate/test_growth.py",
    "tests/unit/estimate/test_trace.py",
    "tests/unit/estimate/test_trace_cache.py",
    "tests/unit/estimate/test_whole_lattice.py",
    "tests/unit/operations/test_explaining.py",
    "tests/unit/operations/test_narrowing.py",
    "tests/unit/operations/test_searching.py",
    "tests/unit/operations/test_self_test.py",
    "tests/unit/probe/test_run.py",
    "tests/unit/search/test_adviser.py",
    "tests/unit/search/test_loop.py",
    "tests/unit/search/test_predictions_in_search.py",
    "tests/unit/store/test_leases.py",
    "tests/unit/store/test_store_concurrency.py",
    "tests/unit/techniques/test_memory_order.py",
    "tests/unit/training/test_exactness.py",
    "tests/unit/training/test_native_ops.py",
)
"""What `make test-fast` leaves out: those, and the modules that took more than some 15 s when they were last timed."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow ones, and begin with what takes longest: those that never run two at once, then the other slow
    ones. Otherwise one process would still be at them when the others have ended."""
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    longest = (TRAINS, STARTS_RAY, SLOW, "")
    items.sort(key=lambda item: next(n for n, some in enumerate(longest) if item.nodeid.startswith(some)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers: tests that start Ray run one after another, those that train, too, the rest by module."""
    from xdist.scheduler import LoadScopeScheduling

    class ByNeed(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            for others in (STARTS_RAY, TRAINS):
                if nodeid.startswith(others):
                    return others[0]
            return nodeid.partition("::")[0]

    return ByNeed(config, log)


@pytest.fixture(scope="session", autouse=True)
def nothing_of_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whatever names no store uses one that belongs to the tests, and caches are theirs, too."""
    with pytest.MonkeyPatch.context() as patch:
        # One folder of traces for all test processes, each of which has a folder of its own in the same one.
        whole = tmp_path_factory.getbasetemp()
        cache = whole.parent if "PYTEST_XDIST_WORKER" in os.environ else whole
        patch.setenv("AUTOFIT_CACHE", str(cache / "cache"))
        patch.setenv("AUTOFIT_STORE", str(tmp_path_factory.mktemp("store") / "default.db"))
        # Of each of several test processes its own: their trials are not to wait for each other's.
        patch.setenv("AUTOFIT_LOCKS", str(tmp_path_factory.mktemp("locks")))
        yield


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage() -> None:
    """Make garbage collections skip what exists by now: torch and transformers have a million objects, which trainers
    and measurements would otherwise scan every time they collect."""
    gc.freeze()


ENTRIES = str(Path(__file__).parent / "unit" / "trial")


def serving(entries: str) -> list[str]:
    """The command of a fork server whose children do what their model is named after, of these entry functions."""
    serve = f"from autofit.trial.process import fork_server as f; f.DEFAULT_ENTRY = '{entries}:by_name'; f.main()"
    return [sys.executable, "-c", serve]


@pytest.fixture(scope="session")
def warm() -> Iterator[TrialRunner]:
    """One fork server for many trials: nothing that its children do (`entries`) may keep it from running the next
    one."""
    from autofit.trial.process.runner import TrialRunner

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ENTRIES, prepend=":")
        runner = TrialRunner()
    with runner:
        runner._command = serving("entries")
        yield runner


@pytest.fixture(scope="session")
def ranks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For offload=nvme, as `pair` knows it."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="session")
def pair(ranks_folder: Path) -> Iterator[GroupRunner]:
    """Two of them, for trials of two ranks (`rank_entries`)."""
    from autofit.techniques.axes.sharding import NVME_VARIABLE
    from autofit.trial.process.group_runner import GroupRunner

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NVME_VARIABLE, str(ranks_folder))
        patch.setenv("PYTHONPATH", ENTRIES, prepend=":")
        runners = GroupRunner(ranks=2)
    with runners:
        for runner in runners._runners:
            runner._command = serving("rank_entries")
        yield runners


@pytest.fixture(scope="session")
def compiled_adam() -> None:
    """DeepSpeed's CPU Adam is compiled."""
    from tests.compiled import compiled

    compiled("cpu_adam")


@pytest.fixture(scope="session")
def compiled_files() -> None:
    """All of DeepSpeed that offload=nvme uses is compiled, which needs libaio."""
    from autofit.training.prerequisites import native_ops
    from tests.compiled import compiled

    compiled(*native_ops.operations())
