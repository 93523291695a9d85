"""Runs the searches of a replay on all cores: those that are not saved yet, each saved as it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from autofit.errors import AutofitError
from autofit.operations.replaying import recorded_problems
from autofit.search.replay.kept import RIVALS, Kept, KeptSearches, searched
from autofit.search.replay.method import CannotRun
from autofit.search.replay.methods import METHODS
from autofit.search.replay.recorded import Recorded

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Tables:
    """Recorded tables that are replayed under one limit and may learn from each other."""

    files: tuple[Path, ...]
    memory_limit_bytes: int | None = None
    """None for each table's own."""
    store: str | None = None
    """The store that keeps estimates."""

    def problems(self, report: Report = lambda line: None) -> dict[str, Recorded]:
        """The problems in which at least one config fits, by name."""
        limit = self.memory_limit_bytes
        every = recorded_problems(self.files, memory_limit_bytes=limit, store=self.store, report=report)
        return {recorded.problem.name: recorded for recorded in every if recorded.points}


@dataclass(frozen=True, slots=True)
class Wanted:
    """One search."""

    tables: Tables
    problem: str
    search: str
    seed: int

    def __str__(self) -> str:
        return f"{self.problem}: {self.search}, seed {self.seed + 1}"


def run_missing(
    groups: Sequence[Tables], searches: Sequence[str], seeds: int, *, keep: Path, jobs: int, report: Report
) -> int:
    """Run the searches that the folder `keep` lacks and save them there; returns how many have run. Searches that
    cannot run here are left out. Every method runs its first seed before any runs its second, so that an interrupted
    replay has some of each."""
    shelves: dict[tuple[Tables, str, str], KeptSearches] = {}
    missing: dict[tuple[Tables, str, str], set[int]] = {}
    for tables in groups:
        for name, recorded in tables.problems(report).items():
            for search in searches:
                key = tables, name, search
                shelves[key] = KeptSearches.of(keep, recorded, search, METHODS[search])
                missing[key] = set(range(seeds)) - shelves[key].traces().keys()
            if any(missing[tables, name, search] and is_ours(search) for search in searches):
                recorded.problem.foresee()  # once here, so that not every worker does it: the store keeps the estimates
    wanted = [Wanted(*key, seed) for seed in range(seeds) for key, lacking in missing.items() if seed in lacking]
    run = 0
    for one, found, seconds in _run(wanted, min(jobs, len(wanted))):
        if isinstance(found, str):
            report(f"{one} not run: {found}")
            continue
        shelves[one.tables, one.problem, one.search].add(found)
        run += 1
        report(f"{run} of {len(wanted)}: {one}: {len(found.asked)} asks, {seconds:.1f} s")
    return run


def is_ours(search: str) -> bool:
    """Whether a method is this project's own."""
    return METHODS[search].__module__ not in RIVALS


def _run(wanted: Sequence[Wanted], jobs: int) -> Iterator[tuple[Wanted, Kept | str, float]]:
    """The searches, as they end."""
    if jobs <= 1:
        for one in wanted:
            yield one, *run_one(one)
        return
    # No fork: libraries that have started threads do not survive it.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_the_parent) as pool:
        asked = {pool.submit(run_one, one): one for one in wanted}
        try:
            for done in as_completed(asked):
                yield asked[done], *done.result()
        except BrokenProcessPool as broken:
            raise AutofitError(
                "a worker was killed; finished searches are saved: run the same command again to continue"
            ) from broken
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_one(wanted: Wanted) -> tuple[Kept | str, float]:
    """One search and its seconds of computing; if it cannot run here, the reason in place of the search."""
    recorded = _problems(wanted.tables)[wanted.problem]
    started = time.perf_counter()
    try:
        found, _ = searched(recorded, METHODS[wanted.search], wanted.seed)
    except CannotRun as missing:
        return str(missing), 0.0
    return found, time.perf_counter() - started


@cache
def _problems(tables: Tables) -> dict[str, Recorded]:
    """The problems, read once in every worker."""
    return tables.problems()


def _end_with_the_parent() -> None:
    """Let an interrupt end the worker at once, and also the end of the process that waits for it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
