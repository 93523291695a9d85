"""Recorded tables of worlds made by formula, without files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from unit.search.made_truth import Truth

from autofit.bench.oracle import SearchMethod, Trace, searched
from autofit.bench.problem import Problem
from autofit.bench.recorded import Recorded
from autofit.core.lattice import Config
from autofit.core.outcome import Outcome, Trial
from autofit.core.units import GIB
from autofit.techniques import lightness

LIMIT = 2 * GIB
"""Some configs of each method fit it in the tests' worlds, but not all."""


def problem_of(truth: Truth, configs: Iterable[Config], *, limit: int = LIMIT, method: str = "full") -> Problem:
    """The problem that consists of these configs."""
    return Problem(
        table="made",
        method=method,
        configs=tuple(sorted(configs, key=lightness)),
        workload=truth.job.workload,
        hardware=truth.job.hardware,
        stack=truth.job.stack,
        memory_limit_bytes=limit,
    )


def recorded(
    truth: Truth,
    *,
    method: str = "full",
    limit: int = LIMIT,
    keep: Callable[[Config], bool] = lambda config: True,
    seconds: Callable[[Config], float] = lambda config: 7.5,
) -> Recorded:
    """A table of the world's configs of a method, each run once."""
    configs = [c for c in truth.lattice.configs if method in (c["method"], "any") and keep(c)]
    trials = {c: replace(truth.trial(c, limit), seconds=seconds(c)) for c in configs}
    return Recorded(problem=problem_of(truth, configs, limit=limit, method=method), trials=trials)


def of_outcomes(truth: Truth, outcomes: dict[Config, Outcome], limit: int = LIMIT, *, method: str = "full") -> Recorded:
    """A table of these outcomes."""
    trials = {c: replace(truth.trial(c, limit), outcome=outcome) for c, outcome in outcomes.items()}
    return Recorded(problem=problem_of(truth, outcomes, limit=limit, method=method), trials=trials)


def run(table: Recorded, method: SearchMethod, seed: int = 0) -> Trace:
    """One search."""
    return searched(table, method, seed)


def trace(table: Recorded, order: Iterable[Config], *, seconds: float = 7.5, stopped: bool = False) -> Trace:
    """A search that ran these configs, in this order."""
    runs = tuple(replace(table.trials[c], seconds=seconds) for c in order)
    return Trace(runs=runs, asks=len(runs), stopped=stopped)


def lines_of(trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """What `autofit bench record` would have written."""
    every = list(trials)
    header = {
        "schema": 1,
        "hardware": every[0].hardware.to_json(),
        "stack": every[0].stack.to_json(),
        "workload": every[0].workload.to_json(),
        "space": "cpu",
        "memory_limit_bytes": every[0].memory_limit_bytes,
        "recorded_at": "2026-03-01T00:00:00+00:00",
    }
    rows = ({"config": t.config.to_json(), **t.outcome.to_json(), "seconds": t.seconds} for t in every)
    return [header, *rows]


def write(file: Path, lines: Iterable[dict[str, Any]]) -> Path:
    """The lines as a file."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
