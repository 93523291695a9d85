"""The problems of a replay: recorded tables, split by training method, under the limits that they are replayed at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import autofit
from autofit.errors import NothingFits, UsageError, unknown
from autofit.operations.recorded_tables import RecordedTable, is_table, read_whole
from autofit.operations.replay_foresight import ReplayForesight
from autofit.outcome import Fits, OutOfMemory, Trial
from autofit.units import format_bytes
from autofit.workload import METHODS

if TYPE_CHECKING:
    # Imported where it is used: Optuna takes a quarter of a second.
    from autofit.search.replay.recorded import Recorded

RECORDED = Path(autofit.__file__).parent.parent / "benchmarks" / "recorded"
"""The tables of a checkout, which are replayed if none is named."""
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Recorded tables that are replayed together: each may learn from the others."""

    files: tuple[Path, ...] = ()
    """Those of the checkout if none is named."""
    memory_limit_bytes: int | None = None
    """None for each table's own."""
    out_of_memory: float | None = None
    """If given, only the problems of which a smaller share of configs runs out of memory, each under the limit at which
    this share does (`limit_for`)."""
    store: str | None = None
    """URL of the store that keeps estimates."""

    def paths(self) -> list[Path]:
        """The files to read. Raises `UsageError` for one that is not there, and for two of the same name, which could
        not be told apart."""
        tables = list(self.files) or sorted(path for path in RECORDED.glob("*.jsonl") if is_table(path))
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

    def problems(self, report: Report = lambda line: None) -> list[Recorded]:
        """The problems, including those in which nothing fits. `report` is called with a line on what is done next.

        Raises what `paths` raises, `UsageError` for a table that is not whole and a limit above a table's, and
        `NothingFits` if nothing fits in any table.
        """
        whole = [read_whole(table) for table in self.paths()]
        foresight = ReplayForesight(whole, store=self.store, report=report)
        digests = {table.file: sha256(table.file.read_bytes()).hexdigest() for table in whole}
        problems = []
        for table in whole:
            if table.contradicting:
                number = len(table.contradicting)
                some = "1 config fits" if number == 1 else f"{number} configs fit"
                report(f"{table.name}: {some} in one pass but not in another: counted as not fitting")
            others = tuple(sorted(digest for file, digest in digests.items() if file != table.file))
            problems += list(self._problems_of(table, foresight, others))
        if problems and not any(recorded.points for recorded in problems):
            raise _nothing_fits(problems)
        return problems

    def _problems_of(
        self, table: RecordedTable, foresight: ReplayForesight, others: Sequence[str]
    ) -> Iterator[Recorded]:
        """One for each training method of a table and, if there are several, one of all together."""
        from autofit.search.replay.problem import ANY, Problem, listed
        from autofit.search.replay.recorded import Recorded, under

        cold, warm = cache(partial(foresight.cold, table)), cache(partial(foresight.warm, table))
        by_method = {m: [t for t in table.trials if t.config["method"] == m] for m in METHODS}
        parts = {method: trials for method, trials in by_method.items() if trials}
        for method, trials in [*parts.items(), *([(ANY, table.trials)] if len(parts) > 1 else [])]:
            limit = self._limit(table, trials)
            if limit is None:
                continue
            problem = Problem(
                table=table.name,
                method=method,
                configs=listed(tuple(trial.config for trial in trials)),
                workload=table.workload,
                hardware=table.hardware,
                stack=table.stack,
                memory_limit_bytes=limit,
                foresee=cold,
                foresee_warm=warm,
                others=tuple(others),
            )
            known = {t.config: replace(t, outcome=under(limit, t.outcome), memory_limit_bytes=limit) for t in trials}
            yield Recorded(problem=problem, trials=known)

    def _limit(self, table: RecordedTable, trials: Sequence[Trial]) -> int | None:
        """The memory limit that these trials of a table are replayed under, in bytes; None to leave them out."""
        limit = self.memory_limit_bytes
        if limit is not None and limit > table.memory_limit_bytes:
            raise UsageError(
                f"memory-limit {format_bytes(limit)} is above the {format_bytes(table.memory_limit_bytes)} under which "
                f"{table.file} was recorded: what would have fitted is not known"
            )
        own = table.memory_limit_bytes if limit is None else limit
        return own if self.out_of_memory is None else limit_for(trials, self.out_of_memory, below=own)


def limit_for(trials: Iterable[Trial], share: float, *, below: int) -> int | None:
    """The highest memory limit, of those halfway between two neighbouring sizes, at which at least `share` of the
    configs runs out of memory; in bytes. None if as many do under the limit `below`, or if nothing would be left."""
    every = list(trials)
    fitting = [t.outcome.measurement.device_bytes for t in every if isinstance(t.outcome, Fits)]
    sizes = sorted((size for size in fitting if size <= below), reverse=True)
    ran_out = sum(isinstance(t.outcome, OutOfMemory) for t in every) + len(fitting) - len(sizes)
    more = math.ceil(share * len(every) - 1e-9) - ran_out  # 0.1 * 30 is a little more than 3
    if more <= 0:
        return None
    smallest_out = sizes[more - 1] if more <= len(sizes) else 0
    largest_in = next((size for size in sizes if size < smallest_out), None)
    return None if largest_in is None else (smallest_out + largest_in) // 2


def _nothing_fits(problems: Sequence[Recorded]) -> NothingFits:
    table, limit = problems[0].problem.table, problems[0].problem.memory_limit_bytes
    return NothingFits(f"nothing of {table} fits {format_bytes(limit)}: give a higher --memory-limit, or another table")
