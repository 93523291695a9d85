"""Configs that ran more than once on one hardware, which show how much executions of one config differ."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, bindparam, func, select
from sqlalchemy.orm import aliased

from autofit.core.outcome import Fits
from autofit.core.repeatability import Execution
from autofit.store.ranking import Columns, only_of_config, same_config
from autofit.store.tables import OF_CONFIG, TrialRow

LATEST = 2000
"""Number of the hardware's latest trials that are examined: about those of the last hundred searches. How noisy a
machine is changes over time, and an answer must not wait for its whole history."""


def of_hardware(connection: Connection, hardware_key: str) -> list[list[Execution]]:
    """The executions of each config and workload that was recently timed in full more than once under one stack.

    Trials of a single timed step are left out: they have no spread of their own that could be subtracted. So are those
    that others disturbed: they do not show how much executions differ by themselves.
    """
    executions: defaultdict[tuple[str, str, str], list[Execution]] = defaultdict(list)
    for stack, workload, key, speed, width in connection.execute(_REPEATED, {"hardware_key": hardware_key}):
        if width is not None and speed:
            executions[stack, workload, key].append((speed, width))
    return list(executions.values())


def _undisturbed(rows: Columns) -> ColumnElement[bool]:
    """The condition that a trial fitted, was timed in full and not disturbed by others."""
    return and_(rows.outcome == Fits.kind, ~rows.stopped_early, ~rows.suspect)


def _repeated() -> Select[*tuple[Any, ...]]:
    latest = (
        select(
            *(getattr(TrialRow, name) for name in OF_CONFIG), TrialRow.outcome, TrialRow.stopped_early, TrialRow.suspect
        )
        .where(TrialRow.hardware_key == bindparam("hardware_key"))
        .order_by(TrialRow.id.desc())
        .limit(LATEST)
        .subquery()
    )
    keys = [latest.c[name] for name in OF_CONFIG]
    repeated = select(*keys).where(_undisturbed(latest.c)).group_by(*keys).having(func.count() > 1).subquery()
    run = aliased(TrialRow, name="run")
    spread = run.evidence[("measurement", "step_seconds", "relative_spread")].as_float()
    return (
        select(run.stack_key, run.workload_key, run.config_key, run.tokens_per_second, spread)
        .join_from(repeated, run, same_config(run, repeated.c))
        .where(only_of_config(_undisturbed(run)))
        .order_by(run.id)
    )


_REPEATED = _repeated()  # built once, because that takes longer than running it
