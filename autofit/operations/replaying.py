"""Search methods driven over recorded tables as if the trials ran, and what it costs each to find the best config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import autofit
from autofit.errors import NothingFits, UsageError, unknown
from autofit.operations.recorded_tables import RecordedTable, is_table, read_whole
from autofit.operations.replay_foresight import ReplayForesight
from autofit.units import format_bytes
from autofit.workload import METHODS

if TYPE_CHECKING:
    # Imported where it is used: Optuna takes a quarter of a second.
    from autofit.search.replay.method import SearchMethod
    from autofit.search.replay.recorded import Recorded
    from autofit.search.replay.score import Score
    from autofit.search.replay.trace import Trace
    from autofit.search.replay.trajectory import Trajectory

RECORDED = Path(autofit.__file__).parent.parent / "benchmarks" / "recorded"
"""The tables of a checkout, which are replayed if none is named."""
SEEDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One problem, with the score of every method on it."""

    recorded: Recorded
    scores: Mapping[str, Score | str]
    """By method name; for a method that cannot run here, the reason."""
    trajectories: Mapping[str, Trajectory]
    """By method name, for the methods that have run."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        problem, recorded = self.recorded.problem, self.recorded
        bytes_, speed = recorded.reference
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
            "reference_point": {"device_bytes": bytes_, "tokens_per_second": speed},
            "methods": [
                {"name": name, "not_run": score, "score": None}
                if isinstance(score, str)
                else {
                    "name": name,
                    "not_run": None,
                    "score": {**score.to_json(), "trajectory": self.trajectories[name].to_json()},
                }
                for name, score in self.scores.items()
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Every problem of the tables, judged."""

    seeds: int
    problems: tuple[Judged, ...]
    left_out: tuple[str, ...]
    """Names of the problems in which nothing fits."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "seeds": self.seeds,
            "problems": [judged.to_json() for judged in self.problems],
            "left_out": list(self.left_out),
        }


def replay(
    tables: Sequence[Path] = (),
    *,
    methods: Iterable[str] = (),
    seeds: int = SEEDS,
    memory_limit_bytes: int | None = None,
    store: str | None = None,
    keep: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> ReplayResult:
    """Drive search methods over recorded tables, as if the trials ran, with the recorded seconds as their cost.

    Without tables, those of the checkout are used; without methods, all. Every training method of a table is a problem
    of its own. Under a limit below the table's, whatever exceeds it counts as out of memory. The store at this URL
    serves only as a cache of estimates. Searches already in the folder `keep` are not run again, and new ones are added
    to it. `report` is called with a line on what is done next.

    Raises `UsageError` for unknown names, a table that is not whole, and a limit above a table's, and `NothingFits`
    if nothing fits in any table.
    """
    from autofit.search.replay.methods import chosen

    if seeds < 1:
        raise UsageError(f"seeds is {seeds}: it must be at least 1")
    searches = chosen(methods)
    problems = recorded_problems(tables, memory_limit_bytes=memory_limit_bytes, store=store, report=report)
    return ReplayResult(
        seeds=seeds,
        problems=tuple(_judged(recorded, searches, seeds, keep, report) for recorded in problems if recorded.points),
        left_out=tuple(recorded.problem.name for recorded in problems if not recorded.points),
    )


def recorded_problems(
    tables: Sequence[Path] = (),
    *,
    memory_limit_bytes: int | None = None,
    store: str | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> list[Recorded]:
    """The problems of `replay`, including those in which nothing fits. Raises what `replay` raises."""
    whole = [read_whole(table) for table in _tables(tables)]
    limits = partial(_limit, limit=memory_limit_bytes)
    foresight = ReplayForesight(whole, limits, store=store, report=report)
    digests = {table.file: sha256(table.file.read_bytes()).hexdigest() for table in whole}
    problems = []
    for table in whole:
        if table.contradicting:
            report(
                f"{table.name}: {len(table.contradicting)} configs fit in one pass but not in another: "
                "counted as not fitting"
            )
        others = tuple(sorted(digest for file, digest in digests.items() if file != table.file))
        problems += _problems(table, limits(table), foresight, others)
    if not any(recorded.points for recorded in problems):
        raise _nothing_fits(problems)
    return problems


def _judged(
    recorded: Recorded,
    searches: Mapping[str, SearchMethod],
    seeds: int,
    keep: Path | None,
    report: Callable[[str], None],
) -> Judged:
    from autofit.search.replay.method import CannotRun
    from autofit.search.replay.score import score
    from autofit.search.replay.trajectory import trajectory

    scores: dict[str, Score | str] = {}
    trajectories = {}
    for name, method in searches.items():
        try:
            traces = list(_traces(recorded, name, method, seeds, keep, report))
        except CannotRun as missing:
            scores[name] = str(missing)
        else:
            scores[name], trajectories[name] = score(recorded, traces), trajectory(recorded, traces)
    return Judged(recorded=recorded, scores=scores, trajectories=trajectories)


def _traces(
    recorded: Recorded, name: str, method: SearchMethod, seeds: int, keep: Path | None, report: Callable[[str], None]
) -> Iterator[Trace]:
    """One search per seed. Raises `CannotRun` if the method lacks something here."""
    from autofit.search.replay.kept import KeptSearches, searched

    kept = None if keep is None else KeptSearches.of(keep, recorded, name, method)
    known = {} if kept is None else kept.traces()
    for seed in range(seeds):
        if seed in known:
            yield known[seed]
            continue
        report(f"{recorded.problem.name}: {name}, seed {seed + 1} of {seeds}")
        search, trace = searched(recorded, method, seed)
        if kept is not None:
            kept.add(search)
        yield trace


def _tables(named: Sequence[Path]) -> list[Path]:
    """The files to read. Raises `UsageError` for two of the same name, which could not be told apart."""
    tables = list(named) or sorted(path for path in RECORDED.glob("*.jsonl") if is_table(path))
    if not tables:
        raise UsageError(f"there is no recorded table in {RECORDED}, which a checkout has: give --table FILE")
    for table in tables:
        if not table.exists():
            folder = table.parent if table.parent.is_dir() else RECORDED
            raise unknown("table", str(table), [str(path) for path in sorted(folder.glob("*.jsonl"))])
    stems = [table.stem for table in tables]
    for stem in stems:
        if stems.count(stem) > 1:
            raise UsageError(f"two tables are named {stem}: give each once, under names of their own")
    return tables


def _limit(table: RecordedTable, *, limit: int | None) -> int:
    """The memory limit that `table` is replayed under, in bytes."""
    if limit is not None and limit > table.memory_limit_bytes:
        raise UsageError(
            f"memory-limit {format_bytes(limit)} is above the {format_bytes(table.memory_limit_bytes)} under which "
            f"{table.file} was recorded: what would have fitted is not known"
        )
    return table.memory_limit_bytes if limit is None else limit


def _problems(table: RecordedTable, limit: int, foresight: ReplayForesight, others: tuple[str, ...]) -> list[Recorded]:
    from autofit.search.replay.problem import Problem, listed
    from autofit.search.replay.recorded import Recorded, under

    cold, warm = cache(partial(foresight.cold, table)), cache(partial(foresight.warm, table))
    elsewhere = cache(partial(foresight.elsewhere, table))
    problems = []
    for method in METHODS:
        trials = {trial.config: trial for trial in table.trials if trial.config["method"] == method}
        if not trials:
            continue
        problem = Problem(
            table=table.name,
            method=method,
            configs=listed(tuple(trials)),
            workload=table.workload,
            hardware=table.hardware,
            stack=table.stack,
            memory_limit_bytes=limit,
            foresee=cold,
            foresee_warm=warm,
            foresee_elsewhere=elsewhere,
            others=others,
        )
        known = {c: replace(t, outcome=under(limit, t.outcome), memory_limit_bytes=limit) for c, t in trials.items()}
        problems.append(Recorded(problem=problem, trials=known))
    return problems


def _nothing_fits(problems: Sequence[Recorded]) -> NothingFits:
    table, limit = problems[0].problem.table, problems[0].problem.memory_limit_bytes
    return NothingFits(f"nothing of {table} fits {format_bytes(limit)}: give a higher --memory-limit, or another table")
