"""Runs the searches of a replay on several cores: those that are not kept yet, each kept as it ends."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from autofit.errors import AutofitError
from autofit.operations.replay_problems import Report, Tables
from autofit.search.replay.kept import RIVALS, Kept, KeptSearches, searched
from autofit.search.replay.method import CannotRun, SearchMethod
from autofit.search.replay.methods import METHODS
from autofit.search.replay.recorded import Recorded

Place = tuple[str, str]
"""Names of a problem and of a method."""
Task = TypeVar("Task")
Done = TypeVar("Done")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One search."""

    problem: str
    search: str
    seed: int

    def __str__(self) -> str:
        return f"{self.problem}: {self.search}, seed {self.seed + 1}"


def run_missing(
    tables: Tables,
    problems: Sequence[Recorded],
    searches: Mapping[str, SearchMethod],
    seeds: int,
    *,
    keep: Path,
    jobs: int,
    report: Report,
) -> dict[Place, str]:
    """Run the searches over the problems of `tables` that the folder `keep` lacks, `jobs` at a time, and save them.

    Every method runs its first seed before any runs its second, so that an interrupted replay has some of each.
    Returns, for each method that cannot run here, the reason.
    """
    by_name = {recorded.problem.name: recorded for recorded in problems}
    shelves: dict[Place, KeptSearches] = {}
    missing: dict[Place, set[int]] = {}
    for name, recorded in by_name.items():
        for search, method in searches.items():
            shelves[name, search] = shelf = KeptSearches.of(keep, recorded, search, method)
            missing[name, search] = set(range(seeds)) - shelf.traces().keys()
        if any(missing[name, search] and method.__module__ not in RIVALS for search, method in searches.items()):
            with suppress(AutofitError):  # the search itself says what is missing
                recorded.problem.foresee()  # once here, so that not every worker does it: the store keeps the estimates
    wanted = [Wanted(*place, seed) for seed in range(seeds) for place, lacking in missing.items() if seed in lacking]
    cannot: dict[Place, str] = {}
    run = 0
    for one, found, seconds in _run(tables, by_name, searches, wanted, jobs):
        place = one.problem, one.search
        if isinstance(found, str):
            if place not in cannot:
                report(f"{one.problem}: {one.search} not run: {found}")
            cannot[place] = found
            continue
        shelves[place].add(found)
        run += 1
        report(f"{run} of {len(wanted)}: {one}: {len(found.asked)} asks, {seconds:.1f} s")
    return cannot


def _run(
    tables: Tables,
    problems: Mapping[str, Recorded],
    searches: Mapping[str, SearchMethod],
    wanted: Sequence[Wanted],
    jobs: int,
) -> Iterator[tuple[Wanted, Kept | str, float]]:
    """The searches, as they end."""
    if min(jobs, len(wanted)) <= 1:
        for one in wanted:
            yield one, *_timed(problems[one.problem], searches[one.search], one.seed)
        return
    for one, (found, seconds) in each(partial(_run_one, tables), wanted, jobs):
        yield one, found, seconds


def each(work: Callable[[Task], Done], tasks: Sequence[Task], jobs: int) -> Iterator[tuple[Task, Done]]:
    """Do `work` for each task in `jobs` processes of one thread; yields each task with its result, as they end.

    Raises what the work raises, and `AutofitError` if a process is killed.
    """
    # No fork: libraries that have started threads do not survive it.
    context = multiprocessing.get_context("spawn")
    with (
        _one_thread_each(),
        ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context, initializer=_end_with_the_parent) as pool,
    ):
        asked = {pool.submit(work, task): task for task in tasks}
        try:
            for done in as_completed(asked):
                yield asked[done], done.result()
        except BrokenProcessPool as broken:
            raise AutofitError(
                "a worker was killed; finished searches are saved: run the same command again to continue"
            ) from broken
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run_one(tables: Tables, wanted: Wanted) -> tuple[Kept | str, float]:
    """The same in a worker."""
    return _timed(problems_of(tables)[wanted.problem], METHODS[wanted.search], wanted.seed)


def _timed(recorded: Recorded, method: SearchMethod, seed: int) -> tuple[Kept | str, float]:
    """One search and its seconds of computing; if it cannot run here, the reason in place of the search."""
    started = time.perf_counter()
    try:
        found, _ = searched(recorded, method, seed)
    except CannotRun as missing:
        return str(missing), 0.0
    return found, time.perf_counter() - started


@cache
def problems_of(tables: Tables) -> dict[str, Recorded]:
    """The problems of which something fits, by name; read once in every worker."""
    found = {recorded.problem.name: recorded for recorded in tables.problems() if recorded.points}
    gc.collect()
    gc.freeze()  # accelerate collects garbage at every trial, which would take seconds with all libraries on the heap
    return found


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that start meanwhile compute on one core each: every core runs a search of its own."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _end_with_the_parent() -> None:
    """Let an interrupt end the worker at once, and also the end of the process that waits for it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
