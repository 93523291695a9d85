"""The kernel's counters of what a processor did, before and after a trial's timed part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autofit.core.device.state import ProcessorState
from autofit.trial.limits import control_groups
from autofit.trial.machine.cores import CORES

PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Running totals, in seconds of processor time unless stated otherwise."""

    cores: int
    busy: float
    stolen: float
    own: dict[int, float]
    """Of each process of the trial."""
    held: float | None
    """For how long a quota held threads back."""
    heat_events: int | None


def read(session: int) -> Counters | None:
    """The counters now, for a trial whose processes are in the session of that number; None where the kernel does not
    keep them, as in sandboxes."""
    allowed = os.sched_getaffinity(0)
    per_second = os.sysconf("SC_CLK_TCK")
    cores, busy, stolen = 0, 0, 0
    try:
        for line in (PROC / "stat").read_text().splitlines():
            name, *counts = line.split()
            if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in allowed:
                # proc(5): user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user.
                user, nice, system, _, _, irq, softirq, steal = map(int, counts[:8])
                cores, busy, stolen = cores + 1, busy + user + nice + system + irq + softirq, stolen + steal
    except (OSError, ValueError):
        return None
    if busy == 0:
        return None  # a sandbox that shows zeros
    return Counters(
        cores=cores,
        busy=busy / per_second,
        stolen=stolen / per_second,
        own={pid: ticks / per_second for pid, ticks in _ticks(session)},
        held=control_groups.held_back(),
        heat_events=_heat_events(allowed),
    )


def cache_bytes() -> int:
    """Bytes of the last level of cache of all processors that this process may use; 0 where the system does not say."""
    sizes: dict[tuple[int, str], int] = {}
    for core in os.sched_getaffinity(0):
        for index in (CORES / f"cpu{core}" / "cache").glob("index*"):
            with suppress(OSError, ValueError):
                level, shared = int((index / "level").read_text()), (index / "shared_cpu_list").read_text()
                sizes[level, shared] = 1024 * int((index / "size").read_text().strip().removesuffix("K"))
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


def between(before: Counters, after: Counters, threads: int) -> ProcessorState:
    """What happened from one reading to the other, to a trial that computes with so many threads."""
    held = None if before.held is None or after.held is None else after.held - before.held
    heat = None
    if before.heat_events is not None and after.heat_events is not None:
        heat = after.heat_events - before.heat_events
    # A process that has ended meanwhile is counted by its parent, which waited for it.
    own_seconds = sum(after.own.values()) - sum(before.own.get(pid, 0.0) for pid in after.own)
    return ProcessorState(
        cores=after.cores,
        threads=min(threads, after.cores),
        busy_seconds=after.busy - before.busy,
        own_seconds=max(0.0, own_seconds),
        stolen_seconds=after.stolen - before.stolen,
        held_seconds=held,
        heat_events=heat,
    )


def _ticks(session: int) -> Iterator[tuple[int, int]]:
    """The processes of the session, each with the clock ticks that it and the children it waited for have used."""
    for entry in os.scandir(PROC):
        if not entry.name.isdecimal():
            continue
        with suppress(OSError, ValueError, IndexError):  # it may end at any moment
            # After the name, which may hold anything: state, parent, group, session, ..., four times (proc(5), stat).
            fields = (PROC / entry.name / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                yield int(entry.name), sum(map(int, fields[11:15]))


def _heat_events(allowed: Iterable[int]) -> int | None:
    counts = []
    for core in allowed:
        with suppress(OSError, ValueError):
            counts.append(int((CORES / f"cpu{core}" / "thermal_throttle" / "core_throttle_count").read_text()))
    return sum(counts) if counts else None
