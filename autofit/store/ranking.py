"""The frontier, found inside the database: of 100,000 trials only the few that matter are read."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, func, select

from autofit.outcome import Fits
from autofit.store.tables import TrialRow


def of_context(hardware_key: str, stack_key: str, workload_key: str) -> tuple[ColumnElement[bool], ...]:
    """The condition that a trial is of one hardware, stack and workload."""
    return (
        TrialRow.workload_key == workload_key,
        TrialRow.hardware_key == hardware_key,
        TrialRow.stack_key == stack_key,
    )


def undominated(connection: Connection, context: tuple[ColumnElement[bool], ...]) -> list[int]:
    """Ids of the trials on the frontiers of the families, oldest first: at least what `Frontier.of` would keep,
    whichever families it is given.

    Of each config only the latest attempt that fits counts, whatever its memory limit was.
    """
    following = func.lead(TrialRow.id).over(partition_by=TrialRow.config_key, order_by=TrialRow.id)
    fits = (
        select(
            TrialRow.id,
            TrialRow.family,
            TrialRow.device_bytes,
            TrialRow.tokens_per_second,
            following.label("following"),
        )
        .where(*context, TrialRow.outcome == Fits.kind)
        .cte("fits")
    )
    # The fastest of what needs no more memory; among equals the fastest, then the oldest comes first.
    fastest_lighter = func.max(fits.c.tokens_per_second).over(
        partition_by=fits.c.family,
        order_by=(fits.c.device_bytes, fits.c.tokens_per_second.desc(), fits.c.id),
        rows=(None, -1),
    )
    latest = (
        select(fits.c.id, fits.c.tokens_per_second, fastest_lighter.label("fastest_lighter"))
        .where(fits.c.following.is_(None))
        .cte("latest")
    )
    query = (
        select(latest.c.id)
        .where(latest.c.fastest_lighter.is_(None) | (latest.c.tokens_per_second > latest.c.fastest_lighter))
        .order_by(latest.c.id)
    )
    return list(connection.scalars(query))


def counts(connection: Connection, context: tuple[ColumnElement[bool], ...]) -> dict[str, int]:
    """How many trials each kind of outcome has."""
    query = select(TrialRow.outcome, func.count()).where(*context).group_by(TrialRow.outcome)
    return {outcome: number for outcome, number in connection.execute(query)}
