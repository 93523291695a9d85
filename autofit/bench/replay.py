"""Search methods driven over recorded tables as if the trials ran, and what it costs each to find the best config.

Searches are kept, one file each, as they end: an interrupted replay resumes, and no search runs twice.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import autofit
from autofit.bench import ours, rivals_of_practice, rivals_optuna
from autofit.bench.oracle import CannotRun, SearchMethod, Trace, searched
from autofit.bench.recorded import Recorded
from autofit.bench.score import Score, score
from autofit.bench.tables import LimitOf, Report, predictions_of, problems_of, read
from autofit.catalog.answer_cache import write_cache_file
from autofit.core.document import Document
from autofit.core.errors import AutofitError, UsageError, unknown
from autofit.core.workload import digest
from autofit.operations.recording.table_file import RecordedTable
from autofit.workers.watch import end_with

OURS: Mapping[str, SearchMethod] = {"autofit": ours.search, "autofit-thorough": partial(ours.search, thorough=True)}
METHODS: Mapping[str, SearchMethod] = {**OURS, **rivals_optuna.RIVALS, **rivals_of_practice.RIVALS}
"""Every search method by its name, in display order. A new one needs one new file, and its line here."""
SLOW = ("optuna-gp",)
"""Methods that compute for half a minute to minutes per search, every other one for seconds at most."""
SEEDS = 20
PACKAGE = Path(autofit.__file__).parent
RIVALS_CODE = ("bench", "core", "techniques")
"""Folders of the package that decide what a rival does, and what its kept trace consists of; all of it decides what our
search does."""


def chosen(names: Iterable[str]) -> tuple[str, ...]:
    """These names; those of all methods but the slow ones if none is given. Raises `UsageError` for one that is
    unknown or repeated."""
    selected = tuple(names)
    for name in selected:
        if name not in METHODS:
            raise unknown("search method", name, METHODS)
        if selected.count(name) > 1:
            raise UsageError(f"--methods names {name} twice")
    return selected or tuple(name for name in METHODS if name not in SLOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One problem, with the score of every method on it."""

    recorded: Recorded
    scores: Mapping[str, Score | str]
    """By method name; for a method that cannot run here, the reason."""

    def to_json(self) -> dict[str, Any]:
        problem, recorded = self.recorded.problem, self.recorded
        return {
            "name": problem.name,
            "table": problem.table,
            "method": problem.method,
            "hardware": problem.hardware.to_json(),
            "stack": problem.stack.to_json(),
            "workload": problem.workload.to_json(),
            "memory_limit_bytes": problem.memory_limit_bytes,
            "configs": len(problem.configs),
            "fitting": len(recorded.points),
            "out_of_memory": recorded.out_of_memory,
            "best": {
                "config": recorded.best.config.to_json(),
                "tokens_per_second": recorded.best.measurement.tokens_per_second,
            },
            "frontier": len(recorded.frontier),
            "reference_point": {"device_bytes": recorded.reference_bytes, "tokens_per_second": 0.0},
            "methods": [
                {"name": name, "not_run": score_or_reason, "score": None}
                if isinstance(score_or_reason, str)
                else {"name": name, "not_run": None, "score": asdict(score_or_reason)}
                for name, score_or_reason in self.scores.items()
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult(Document):
    """Every problem of the tables, judged."""

    seeds: int
    problems: tuple[Judged, ...]
    left_out: tuple[str, ...]
    """Names of the problems in which nothing fits."""


class Wanted(NamedTuple):
    """One search."""

    problem: str
    method: str
    seed: int


def replay(
    tables: Sequence[Path] = (),
    *,
    methods: Iterable[str] = (),
    seeds: int = SEEDS,
    limit_of: LimitOf | None = None,
    store: str | None = None,
    keep: Path | None = None,
    jobs: int = 1,
    report: Report = lambda line: None,
) -> ReplayResult:
    """Drive search methods over recorded tables, as if the trials ran, with the recorded seconds as their cost.

    Without tables, those of the checkout are used; without methods, all that take seconds a search. `limit_of` lowers
    the tables' memory limits. The store at this URL serves only as a cache of estimates. Searches already in the folder
    `keep` are not run again, and new ones are added to it, `jobs` at a time.

    Raises `UsageError` for unknown names, a table that is not whole, and a limit above a table's, and `NothingFits`
    if nothing fits in any table.
    """
    for name, count in (("seeds", seeds), ("jobs", jobs)):
        if count < 1:
            raise UsageError(f"{name} is {count}: it must be at least 1")
    names = chosen(methods)
    recorded_tables = read(tables)
    every = problems_of(recorded_tables, limit_of)
    problems = {recorded.problem.name: recorded for recorded in every if recorded.points}
    # Every method runs its first seed before any runs its second, so that an interrupted replay has some of each.
    keys = [Wanted(p, method, seed) for seed in range(seeds) for p in problems for method in names]
    with TemporaryDirectory(prefix="autofit-replay-") as temporary:
        folder = keep or Path(temporary)
        files = {key: folder / _file_name(problems[key.problem], key) for key in keys}
        lacking = [key for key in keys if not files[key].exists()]
        names_of_ours = {problems[key.problem].problem.table for key in lacking if key.method in OURS}
        searched_by_us = [table for table in recorded_tables if table.name in names_of_ours]
        foreseen = _with_predictions(problems, searched_by_us, store, report)
        cannot = _run_lacking(foreseen, lacking, files, jobs, report)

        def judge(problem: str, method: str) -> Score | str:
            """The method's score, or why it cannot run here."""
            traces = (files[Wanted(problem, method, seed)].read_bytes() for seed in range(seeds))
            return cannot.get((problem, method)) or score(problems[problem], [*map(pickle.loads, traces)])

        judged = tuple(
            Judged(recorded=recorded, scores={method: judge(name, method) for method in names})
            for name, recorded in problems.items()
        )
    left_out = tuple(recorded.problem.name for recorded in every if not recorded.points)
    return ReplayResult(seeds=seeds, problems=judged, left_out=left_out)


def _with_predictions(
    problems: Mapping[str, Recorded], tables: Iterable[RecordedTable], store: str | None, report: Report
) -> dict[str, Recorded]:
    foreseen = dict(problems)
    for table in tables:
        with suppress(AutofitError):  # the search itself says what is missing
            predictions = predictions_of(table, store=store, report=report)
            for name, recorded in problems.items():
                if recorded.problem.table == table.name:
                    foreseen[name] = replace(recorded, problem=replace(recorded.problem, predictions=predictions))
    return foreseen


def _run_lacking(
    problems: dict[str, Recorded], lacking: Sequence[Wanted], files: Mapping[Wanted, Path], jobs: int, report: Report
) -> dict[tuple[str, str], str]:
    """Run the searches and keep them. Returns, for each problem and method that cannot run here, the reason."""
    cannot: dict[tuple[str, str], str] = {}
    run = 0
    for key, ended in _run(problems, lacking, jobs):
        if isinstance(ended, str):
            if (key.problem, key.method) not in cannot:
                report(f"{key.problem}: {key.method} not run: {ended}")
            cannot[key.problem, key.method] = ended
            continue
        write_cache_file(files[key], pickle.dumps(ended))
        run += 1
        which = f"{key.problem}: {key.method}, seed {key.seed + 1}"
        report(f"{run} of {len(lacking)}: {which}: {ended.asks} asks")
    return cannot


def _run(problems: dict[str, Recorded], keys: Sequence[Wanted], jobs: int) -> Iterator[tuple[Wanted, Trace | str]]:
    """The searches as they end, `jobs` at a time, each on one core."""
    if min(jobs, len(keys)) <= 1:
        _problems.update(problems)
        yield from map(_searched, keys)
        return
    # No fork: libraries that have started threads do not survive it.
    context, workers = multiprocessing.get_context("spawn"), min(jobs, len(keys))
    with (
        patch.dict(os.environ, OMP_NUM_THREADS="1"),  # every core runs a search of its own
        ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(problems,)) as pool,
    ):
        try:
            for done in as_completed([pool.submit(_searched, key) for key in keys]):
                yield done.result()
        except BrokenProcessPool as broken:
            raise AutofitError(
                "a worker was killed; finished searches are saved: run the same command again to continue"
            ) from broken
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_problems: dict[str, Recorded] = {}
"""The problems that this process searches, which is a worker or the only process."""


def _begin(problems: dict[str, Recorded]) -> None:
    """Begin a worker: an interrupt ends it at once, and so does the end of the process that waits for it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with(os.getppid())
    _problems.update(problems)
    gc.collect()
    gc.freeze()  # accelerate collects garbage at every trial, which would take seconds with all libraries on the heap


def _searched(key: Wanted) -> tuple[Wanted, Trace | str]:
    """One search; if it cannot run here, the reason in place of its trace."""
    try:
        return key, searched(_problems[key.problem], METHODS[key.method], key.seed)
    except CannotRun as missing:
        return key, str(missing)


def _file_name(recorded: Recorded, key: Wanted) -> str:
    """A name for all that determines a search: what is asked, the table, the limit, the code and the libraries."""
    decides = digest([*key, recorded.digest, recorded.problem.memory_limit_bytes, _code(key.method in OURS)])
    return f"{key.problem.replace('/', '.')}.{key.method}.{key.seed}.{decides}.pickle"


@cache
def _code(is_ours: bool) -> str:
    """A digest of the code and the installed packages that decide what our search does, or all others."""
    folders = [PACKAGE] if is_ours else [PACKAGE / name for name in RIVALS_CODE]
    code = [file.read_text(encoding="utf-8") for folder in folders for file in sorted(folder.rglob("*.py"))]
    return digest([code, sorted(f"{d.name} {d.version}" for d in distributions()), sys.version_info[:2]])
