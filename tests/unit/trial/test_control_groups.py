"""A machine is what its control groups leave of it, in both versions and however deep the groups are nested."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.core.units import MIB
from autofit.trial.limits import control_groups
from autofit.trial.machine import detection
from autofit.trial.measure import process_memory

Put = Callable[[str, dict[str, str]], None]

UNLIMITED = "9223372036854771712"
"""What version 1 says where there is no limit."""


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Puts this process, on a machine with eight processors, into groups with these files."""
    monkeypatch.setattr(detection.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr("autofit.trial.machine.cores.CORES", tmp_path / "none")  # each with a core of its own
    monkeypatch.setattr(control_groups, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "membership")

    def put(membership: str, files: dict[str, str]) -> None:
        (tmp_path / "membership").write_text(f"{membership}\n")
        for name, text in files.items():
            file = tmp_path / "cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")

    return put


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/", {}, 8),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "1600000 100000"}, 8),
        # A group's quota binds those below it, also where the own folder is not to be seen.
        ("0::/pod/trial", {"pod/cpu.max": "300000 100000", "pod/trial/cpu.max": "max 100000"}, 3),
        ("0::/elsewhere", {"cpu.max": "400000 100000"}, 4),
        ("2:cpu,cpuacct:/\n1:memory:/", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "50000"}, 4),
        ("1:cpu:/\n0::/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("1:cpuset:/", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("0::/", {"cpu.max": "many"}, 8),
    ],
)
def test_a_quota_is_no_more_than_so_many_processors(
    groups: Put, membership: str, files: dict[str, str], cores: int
) -> None:
    groups(membership, files)
    hardware = detection.cpu()
    assert hardware.cores == cores
    assert hardware.name.endswith(f"-{cores}c")


@pytest.mark.parametrize(
    ("membership", "files", "allowed_mib"),
    [
        ("0::/", {}, None),
        ("0::/", {"memory.max": "max"}, None),
        ("0::/", {"memory.max": f"{300 * MIB}"}, 300),
        ("0::/", {"memory.max": "much"}, None),
        # As Slurm and systemd nest them: the least of all groups above binds.
        ("0::/slurm/job/step", {"slurm/job/memory.max": f"{300 * MIB}", "slurm/job/step/memory.max": "max"}, 300),
        ("0::/a/b", {"a/memory.max": f"{300 * MIB}", "a/b/memory.max": f"{200 * MIB}"}, 200),
        ("0::/a/b", {"a/memory.max": f"{200 * MIB}", "a/b/memory.max": f"{300 * MIB}"}, 200),
        # A container that keeps its host's names sees its own group at the root.
        ("0::/docker/1234", {"memory.max": f"{300 * MIB}"}, 300),
        ("0::/a", {"b/memory.max": f"{300 * MIB}"}, None),
        ("2:cpu:/\n1:memory:/job", {"memory/job/memory.limit_in_bytes": f"{300 * MIB}"}, 300),
        ("1:memory:/job\n0::/", {"memory/job/memory.limit_in_bytes": UNLIMITED}, None),
        ("1:cpu:/job\n0::/", {"memory/job/memory.limit_in_bytes": f"{300 * MIB}"}, None),
    ],
)
def test_memory_is_no_more_than_every_group_allows(
    groups: Put, membership: str, files: dict[str, str], allowed_mib: int | None
) -> None:
    groups(membership, files)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    hardware = detection.cpu()
    assert hardware.memory_bytes == hardware.host_memory_bytes
    assert hardware.memory_bytes == (physical if allowed_mib is None else allowed_mib * MIB)


def amounts(**mib: int) -> str:
    """The lines of a memory.stat."""
    return "\n".join(f"{name} {value * MIB}" for name, value in mib.items())


@pytest.mark.parametrize(
    ("membership", "files", "left_mib"),
    [
        (
            "0::/job/step",
            {
                "job/memory.max": f"{300 * MIB}",
                "job/memory.current": f"{200 * MIB}",
                "job/memory.stat": amounts(anon=150, active_file=30, inactive_file=15),
                "job/step/memory.max": "max",
                "job/step/memory.current": f"{100 * MIB}",
            },
            145,
        ),
        (
            "1:memory:/job",
            {
                "memory/job/memory.limit_in_bytes": f"{300 * MIB}",
                "memory/job/memory.usage_in_bytes": f"{200 * MIB}",
                "memory/job/memory.stat": amounts(active_file=1, total_active_file=30, total_inactive_file=15),
            },
            145,
        ),
        ("0::/", {"memory.max": f"{300 * MIB}", "memory.current": f"{301 * MIB}"}, 0),
        ("0::/", {"memory.max": f"{300 * MIB}"}, 300),
    ],
)
def test_what_can_still_be_had_is_what_the_fullest_group_has_left(
    groups: Put, membership: str, files: dict[str, str], left_mib: int
) -> None:
    groups(membership, files)
    assert process_memory.host_available() == left_mib * MIB


def test_a_system_without_control_groups(groups: Put) -> None:
    assert detection.cpu().cores == 8
    available = process_memory.host_available()
    assert available is not None and available <= detection.cpu().memory_bytes
