"""What control groups leave this process of its machine's processors and memory (cgroups(7)).

Version 1 has a hierarchy per controller, version 2 one for all. A group's limit binds the groups below it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
"""The control groups that this process belongs to, one per line: number, controllers, path."""


def processors(machine: int) -> float:
    """How many of the machine's processors the groups allow: a quota of processor time, which may be a fraction."""
    return min([float(machine), *map(_quota, _groups("cpu"))])


def memory_bytes(machine: int) -> int:
    """How much of the machine's memory the groups allow."""
    return min([machine, *(limit for _, limit in _memory_limits())])


def memory_left_bytes(machine: int) -> int:
    """How much of what programs could still allocate on the machine the groups have room for."""
    return min([machine, *(max(0, limit - _memory_held(group)) for group, limit in _memory_limits())])


def held_back() -> float | None:
    """Processor seconds for which quotas have held the threads of this process's groups back since they exist; None
    without such groups. Of nested groups, the one that was held back most."""
    seconds = []
    for group in _groups("cpu"):
        with suppress(OSError, ValueError):
            fields = numbers(group / "cpu.stat")
            if "nr_throttled" in fields:  # version 2 gives microseconds, version 1 nanoseconds
                seconds.append(fields.get("throttled_usec", 0) / 1e6 + fields.get("throttled_time", 0) / 1e9)
    return max(seconds, default=None)


def numbers(file: Path) -> dict[str, int]:
    """The numbers of one of the kernel's files that has a name and a number on each line. Raises `OSError`, and
    `ValueError` for another file."""
    fields = (line.split() for line in file.read_text().splitlines())
    return {name.removesuffix(":"): int(number) for name, number, *_ in fields}


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's groups for `controller`, and of the groups above, as far as they are visible."""
    with suppress(OSError):
        for line in OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                root = ROOT  # version 2
            elif controller in controllers.split(","):
                root = ROOT / controller
            else:
                continue
            lowest = root / path.lstrip("/")
            yield from (group for group in (lowest, *lowest.parents) if group.is_relative_to(root))


def _quota(group: Path) -> float:
    """Processors' worth of time; infinite without a quota."""
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float("inf") if int(quota) < 0 else int(quota) / int(period)
    return float("inf")


def _memory_limits() -> Iterator[tuple[Path, int]]:
    """The groups that limit memory, and their limits in bytes."""
    for group in _groups("memory"):
        limit = _number(group, "memory.max", "memory.limit_in_bytes")
        if limit is not None:
            yield group, limit


def _memory_held(group: Path) -> int:
    """Bytes in use, without the file pages that the kernel gives up before it kills a program."""
    used = _number(group, "memory.current", "memory.usage_in_bytes") or 0
    fields: dict[str, int] = {}
    with suppress(OSError, ValueError):
        fields = numbers(group / "memory.stat")
    # Version 1 leaves the groups below out of what it reports without `total_`.
    cached = sum(fields.get(f"total_{name}", fields.get(name, 0)) for name in ("active_file", "inactive_file"))
    return max(0, used - cached)


def _number(group: Path, *names: str) -> int | None:
    """The number in the first of these files that has one; version 2 writes `max` for no limit."""
    for name in names:
        with suppress(OSError, ValueError):
            return int((group / name).read_text())
    return None
