"""A cache of estimates, by keys that cover everything they depend on; it may be emptied at any time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, select

from autofit.store.database.engine import to_text
from autofit.store.rows import now, put
from autofit.store.tables import Body, EstimateRow

# Far below the number of parameters that one statement may have (SQLite: 32,766), yet enough to keep statements few.
_AT_ONCE = 1000


def known(connection: Connection, keys: Iterable[str]) -> dict[str, Body]:
    """The stored estimates with these keys, by key."""
    asked = list(dict.fromkeys(keys))
    found: dict[str, Body] = {}
    for start in range(0, len(asked), _AT_ONCE):
        part = EstimateRow.key.in_(asked[start : start + _AT_ONCE])
        for key, body in connection.execute(select(EstimateRow.key, EstimateRow.estimate).where(part)):
            found[key] = body
    return found


def keep(connection: Connection, estimates: Mapping[str, Mapping[str, Any]]) -> None:
    """Stores the estimates in place of those with their keys; raises `ValueError` if one holds NaN or infinity."""
    bodies = {key: dict(body) for key, body in estimates.items()}
    to_text(list(bodies.values()))
    recorded_at = now()
    # In the same order for every writer, so that no two deadlock.
    rows = [{"key": key, "estimate": bodies[key], "recorded_at": recorded_at} for key in sorted(bodies)]
    if rows:
        put(connection, EstimateRow, rows)
