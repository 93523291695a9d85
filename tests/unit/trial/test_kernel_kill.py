"""The kernel's own kill for want of memory, in a control group that is really full."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from jobs import tiny_request

from autofit.core.outcome import Crashed, OutOfMemory
from autofit.core.units import MIB
from autofit.trial.measure.process_memory import host_available
from autofit.trial.process.runner import TrialRunner

GROUP_BYTES = 64 * MIB


def _parent_group() -> tuple[Path, str] | None:
    """The folder of this process's control group for memory, and the name of its limit; None without one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
        if controllers == "" and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max"
    return None


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 64 MiB below this process's own, for whoever joins it."""
    placed = _parent_group()
    if placed is None:
        pytest.skip("no control group for memory")
    parent, limit = placed
    group = parent / f"autofit-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (group / limit).write_text(str(GROUP_BYTES))
            with suppress(OSError):
                (group / limit.replace("limit_in_bytes", "memsw.limit_in_bytes").replace("max", "swap.max")).write_text(
                    str(GROUP_BYTES if "limit" in limit else 0)
                )
        except OSError as error:
            pytest.skip(f"the control group takes no limit: {error}")
        if _survives(group):
            pytest.skip("the kernel does not enforce the limit of a control group here")
        yield group
    finally:
        group.rmdir()


def _survives(group: Path) -> bool:
    code = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0'); x = bytearray({4 * GROUP_BYTES})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode != -9


def test_the_kernels_kill_is_out_of_memory_and_costs_one_trial(
    small_group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("AUTOFIT_TEST_GROUP", str(small_group))
    with TrialRunner(entry="entries:greedy_in_a_group") as runner:
        outcome = runner.attempt(tiny_request()).outcome
        assert isinstance(outcome, OutOfMemory), outcome
        assert (outcome.signal, outcome.phase, outcome.host) == ("SIGKILL", "backward", False)
        assert outcome.reason.startswith("the kernel killed the trial")
        available = host_available()
        assert available is not None
        outcome = runner.attempt(tiny_request(memory_limit_bytes=available + 4096 * MIB)).outcome
        assert isinstance(outcome, Crashed) and outcome.transient, "others held the memory: not the config's fault"
