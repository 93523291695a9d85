"""Search methods driven over recorded tables as if the trials ran, and what it costs each to find the best config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from platformdirs import user_cache_path

from autofit.errors import UsageError
from autofit.operations.replay_problems import Report, Tables

if TYPE_CHECKING:
    # Imported where it is used: Optuna takes a quarter of a second.
    from autofit.search.replay.method import SearchMethod
    from autofit.search.replay.recorded import Recorded
    from autofit.search.replay.score import Score
    from autofit.search.replay.trajectory import Trajectory

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


def searches_kept() -> Path:
    """The folder in which `autofit bench replay` keeps searches by default."""
    return user_cache_path("autofit") / "searches"


def replay(
    tables: Sequence[Path] = (),
    *,
    methods: Iterable[str] = (),
    seeds: int = SEEDS,
    memory_limit_bytes: int | None = None,
    out_of_memory: float | None = None,
    store: str | None = None,
    keep: Path | None = None,
    jobs: int = 1,
    report: Report = lambda line: None,
) -> ReplayResult:
    """Drive search methods over recorded tables, as if the trials ran, with the recorded seconds as their cost.

    Without tables, those of the checkout are used; without methods, all that take seconds a search. Every training
    method of a table is a problem of its own, and so are all of a table together. Under a limit below the table's,
    whatever exceeds it counts as out of memory; with `out_of_memory`, only the problems are replayed of which a smaller
    share of configs runs out, each under the limit at which this share does. The store at this URL serves only as a
    cache of estimates. Searches already in the folder `keep` are not run again, and new ones are added to it, `jobs` at
    a time. `report` is called with a line on what is done.

    Raises `UsageError` for unknown names, a table that is not whole, and a limit above a table's, and `NothingFits`
    if nothing fits in any table.
    """
    from autofit.search.replay.methods import chosen

    for name, count in (("seeds", seeds), ("jobs", jobs)):
        if count < 1:
            raise UsageError(f"{name} is {count}: it must be at least 1")
    searches = chosen(methods)
    asked = Tables(files=tuple(tables), memory_limit_bytes=memory_limit_bytes, out_of_memory=out_of_memory, store=store)
    problems = asked.problems(report)
    with _kept_in(keep) as folder:
        judged = _judged(asked, [r for r in problems if r.points], searches, seeds, folder, jobs, report)
    return ReplayResult(
        seeds=seeds,
        problems=judged,
        left_out=tuple(recorded.problem.name for recorded in problems if not recorded.points),
    )


@contextmanager
def _kept_in(folder: Path | None) -> Iterator[Path]:
    """The folder; without one, a temporary one."""
    if folder is not None:
        yield folder
        return
    with TemporaryDirectory(prefix="autofit-replay-") as temporary:
        yield Path(temporary)


def _judged(
    tables: Tables,
    problems: Sequence[Recorded],
    searches: Mapping[str, SearchMethod],
    seeds: int,
    keep: Path,
    jobs: int,
    report: Report,
) -> tuple[Judged, ...]:
    from autofit.operations.replay_at_once import run_missing
    from autofit.search.replay.kept import KeptSearches
    from autofit.search.replay.score import score
    from autofit.search.replay.trajectory import trajectory

    cannot = run_missing(tables, problems, searches, seeds, keep=keep, jobs=jobs, report=report)
    found = []
    for recorded in problems:
        scores: dict[str, Score | str] = {}
        trajectories = {}
        for name, method in searches.items():
            place = recorded.problem.name, name
            if place in cannot:
                scores[name] = cannot[place]
                continue
            kept = KeptSearches.of(keep, recorded, name, method).traces()
            traces = [kept[seed] for seed in range(seeds)]
            scores[name], trajectories[name] = score(recorded, traces), trajectory(recorded, traces)
        found.append(Judged(recorded=recorded, scores=scores, trajectories=trajectories))
    return tuple(found)
