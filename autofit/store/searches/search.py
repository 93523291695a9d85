"""Searches as the store keeps them: what each was asked, its state, and what it answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.document import Document
from autofit.core.workload import Workload
from autofit.store.rows import Reader

ENDINGS = ("succeeded", "nothing_fits", "failed", "cancelled")
"""How a search may end; until then it is `queued` or `running`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search(Document):
    """One search, as it is stored."""

    search_id: str
    state: str
    """`queued`, `running`, or one of `ENDINGS`."""
    request: Mapping[str, Any]
    """What was asked, as a JSON object."""
    result: Mapping[str, Any] | None
    """What the search answered, as a JSON object; None before it ends."""
    hardware_name: str | None
    """What a runner must have to drive it; None for a search that no runner may take."""
    hardware: Hardware | None
    """This and the next are None until a driver has begun."""
    stack: Stack | None
    workload: Workload
    started_at: str
    """When it was asked for, ISO 8601 in UTC."""
    ended_at: str | None
    """When it last ended, ISO 8601 in UTC; None before."""
    campaign_id: str | None
    """Shared by searches that were asked for together."""
    lease_epoch: int
    """How many drivers have had it."""
    held: bool
    """Whether a driver has it: its lease has not expired."""
    spent_seconds: float
    """This and the next: what all its drivers have spent of its budget."""
    spent_trials: int


def read(connection: Connection, reader: Reader, row: Row[*tuple[Any, ...]]) -> Search:
    """The search in a row of `SearchRow`'s columns and `held`; raises `StoreError` if the row makes no sense."""
    plain = ("search_id", "state", "request", "result", "hardware_name", "started_at", "ended_at", "campaign_id")
    spent = ("lease_epoch", "spent_seconds", "spent_trials")
    return Search(
        hardware=None if row.hardware_digest is None else reader.hardware(connection, row.hardware_digest),
        stack=None if row.stack_key is None else reader.stack(connection, row.stack_key),
        workload=reader.workload(connection, row.workload_key),
        held=row.state == "running" and bool(row.held),
        **{name: getattr(row, name) for name in plain + spent},
    )
