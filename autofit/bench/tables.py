"""The problems of a replay: recorded tables, split by training method, and what the estimator says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import autofit
from autofit.bench.problem import ANY, Problem
from autofit.bench.recorded import Recorded
from autofit.catalog.models import load
from autofit.core.errors import NothingFits, UsageError, unknown
from autofit.core.frontier import by_method
from autofit.core.units import format_bytes
from autofit.estimate.estimate import Estimate
from autofit.estimate.time.guessed_rates import prior
from autofit.operations.recording.table_file import RecordedTable, is_table, read_table
from autofit.prediction.calibration import with_observed_allocator
from autofit.prediction.estimate_cache import EstimateCache, readable
from autofit.prediction.predict_configs import predict_all
from autofit.prediction.predictions import Predictions
from autofit.prediction.probing import rates_of
from autofit.techniques import Job, lightness
from autofit.trial.machine.detection import installed_stack

RECORDED = Path(autofit.__file__).parent.parent / "benchmarks" / "recorded"
"""The tables of a checkout, which are replayed if none is named."""
LimitOf = Callable[[Recorded], int | None]
"""The memory limit in bytes under which a problem is replayed; None to leave it out."""
Report = Callable[[str], None]
"""Called with a line on what is done."""


def read(files: Sequence[Path]) -> list[RecordedTable]:
    """The tables in these files; those of the checkout if none is named. Raises `UsageError` for one that is not there
    or not whole, and for two of the same name, which could not be told apart."""
    named = list(files) or sorted(path for path in RECORDED.glob("*.jsonl") if is_table(path))
    if not named:
        raise UsageError(f"there is no recorded table in {RECORDED}, which a checkout has: give --table FILE")
    for file in named:
        if not file.exists():
            folder = file.parent if file.parent.is_dir() else RECORDED
            raise unknown("table", str(file), [str(path) for path in sorted(folder.glob("*.jsonl"))])
    stems = [file.stem for file in named]
    for stem in stems:
        if stems.count(stem) > 1:
            raise UsageError(f"two tables are named {stem}: give each once, under names of their own")
    return [read_table(file, whole=True) for file in named]


def problems_of(tables: Iterable[RecordedTable], limit_of: LimitOf | None = None) -> list[Recorded]:
    """A problem for each training method of a table and, if there are several, one of all together, including those in
    which nothing fits. `limit_of` lowers their limits, or leaves some out.

    Raises `UsageError` for a limit above a table's, and `NothingFits` if nothing fits in any of them.
    """
    problems: list[Recorded] = []
    for table in tables:
        for recorded in _split(table):
            limit = table.memory_limit_bytes if limit_of is None else limit_of(recorded)
            if limit is None:
                continue
            if limit > table.memory_limit_bytes:
                raise UsageError(
                    f"memory-limit {format_bytes(limit)} is above the {format_bytes(table.memory_limit_bytes)} under "
                    f"which {table.file} was recorded: what would have fitted is not known"
                )
            problems.append(recorded.under(limit))
    if problems and not any(recorded.points for recorded in problems):
        name, limit = problems[0].problem.table, problems[0].problem.memory_limit_bytes
        raise NothingFits(
            f"nothing of {name} fits {format_bytes(limit)}: give a higher --memory-limit, or another table"
        )
    return problems


def _split(table: RecordedTable) -> list[Recorded]:
    parts = by_method(table.trials)
    if len(parts) > 1:
        parts[ANY] = list(table.trials)
    digest = sha256(table.file.read_bytes()).hexdigest()
    return [
        Recorded(
            problem=Problem(
                table=table.name,
                method=method,
                configs=tuple(sorted((trial.config for trial in trials), key=lightness)),
                workload=table.workload,
                hardware=table.hardware,
                stack=table.stack,
                memory_limit_bytes=table.memory_limit_bytes,
            ),
            trials={trial.config: trial for trial in trials},
            digest=digest,
        )
        for method, trials in parts.items()
    ]


def predictions_of(
    table: RecordedTable, *, store: str | None = None, report: Report = lambda line: None
) -> Predictions:
    """A search's predictions for a table on a machine where nothing has been measured yet but the probe that was taken
    before the table. Estimating may take minutes; `store` is the URL of a store that keeps estimates."""
    # Traced with the libraries installed here, for the device, driver and optional kernels of the recording.
    recorded_stack = table.stack
    stack = replace(
        installed_stack(),
        cuda=recorded_stack.cuda,
        driver=recorded_stack.driver,
        flash_attn=recorded_stack.flash_attn,
        liger_kernel=recorded_stack.liger_kernel,
    )
    job = Job(model=load(table.workload.model), workload=table.workload, hardware=table.hardware, stack=stack)
    job = with_observed_allocator(job, reversed(table.trials))
    configs = [trial.config for trial in table.trials]
    rates = prior(table.hardware)
    if table.probe is not None and rates is not None:
        rates = rates_of(table.probe, rates)
    with readable(store, create=True) as opened:
        # What is predicted is the same under every limit.
        limit = table.memory_limit_bytes
        footprints = predict_all(
            EstimateCache(job, opened),
            configs,
            memory_limit_bytes=limit,
            report=lambda done, total: report(f"{table.name}: {done} of {total} configs estimated"),
        )
    return Predictions(by_config={c: Estimate.of(f, job, rates).prediction for c, f in footprints.items()})
