"""A cache of estimates, by keys that cover everything they depend on; it may be emptied at any time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, select

from autofit.store.database.engine import ROWS_AT_ONCE, Database, to_text
from autofit.store.rows import precise_now, put
from autofit.store.tables import Body, EstimateRow


class Estimates:
    """The estimates in a store, each as the JSON object that was kept."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def known(self, keys: Iterable[str]) -> dict[str, Body]:
        """Those with these keys that are here, by key."""
        asked = list(dict.fromkeys(keys))

        def work(connection: Connection) -> dict[str, Body]:
            found: dict[str, Body] = {}
            for start in range(0, len(asked), ROWS_AT_ONCE):
                part = EstimateRow.key.in_(asked[start : start + ROWS_AT_ONCE])
                for key, body in connection.execute(select(EstimateRow.key, EstimateRow.estimate).where(part)):
                    found[key] = body
            return found

        return self._database.fetch(work)

    def keep(self, estimates: Mapping[str, Mapping[str, Any]]) -> None:
        """Keeps estimates by key, in place of those that have the same keys; raises `ValueError` if one holds NaN or
        infinity."""
        bodies = {key: dict(body) for key, body in estimates.items()}
        to_text(list(bodies.values()))
        recorded_at = precise_now()
        # In the same order for every writer, so that no two deadlock.
        rows = [{"key": key, "estimate": bodies[key], "recorded_at": recorded_at} for key in sorted(bodies)]
        if rows:
            self._database.commit(lambda c: put(c, EstimateRow, rows))
