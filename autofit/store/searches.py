"""Searches as the store keeps them: what each was asked, its status, and what it answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from autofit.core.document import Document
from autofit.core.errors import UsageError, unknown
from autofit.core.hardware import Hardware, Stack
from autofit.core.workload import Workload
from autofit.store.database.engine import to_text
from autofit.store.rows import Reader, check_text, hardware_digest, keep, now
from autofit.store.tables import SearchRow

ENDINGS = ("done", "interrupted", "failed")
"""How a search may end; until then its status is `running`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search(Document):
    """One search, as it is stored."""

    search_id: str
    status: str
    """`running`, `done`, `interrupted` or `failed`; a search whose process was killed stays `running`."""
    request: Mapping[str, Any]
    """What the user asked, as a JSON object."""
    result: Mapping[str, Any] | None
    """What the search answered, as a JSON object; None before it ends, or if it has no answer."""
    hardware: Hardware
    stack: Stack
    workload: Workload
    started_at: str
    """When it first began, ISO 8601 in UTC."""
    ended_at: str | None
    """When it last ended, ISO 8601 in UTC; None while it runs."""


def begin(
    connection: Connection,
    search_id: str,
    hardware: Hardware,
    stack: Stack,
    workload: Workload,
    request: Mapping[str, Any],
) -> None:
    """Stores a search as running; one that is there already is resumed, with the new request and no result.

    Raises `UsageError` if that one searched on other hardware, under another stack or for another workload, and
    `ValueError` if the request holds NaN or infinity.
    """
    check_text(search_id, "the search's id")
    body = dict(request)
    to_text(body)
    known = connection.execute(select(SearchRow).where(SearchRow.search_id == search_id)).one_or_none()
    if known is None:
        refers = keep(connection, hardware, stack, workload)
        connection.execute(
            insert(SearchRow).values(search_id=search_id, status="running", started_at=now(), request=body, **refers)
        )
        return
    if (known.hardware_digest, known.stack_key, known.workload_key) != (
        hardware_digest(hardware),
        stack.key,
        workload.key,
    ):
        raise UsageError(f"search {search_id!r} is of another hardware, stack or workload")
    _change(connection, search_id, status="running", ended_at=None, request=body, result=None)


def end(connection: Connection, search_id: str, status: str, result: Mapping[str, Any] | None) -> None:
    """Stores how a search ended and what it answered.

    Raises `UsageError` for a status or a search that does not exist, and `ValueError` if the result holds
    NaN or infinity.
    """
    if status not in ENDINGS:
        raise unknown("status of a search", status, ENDINGS)
    body = None if result is None else dict(result)
    to_text(body)
    if not _change(connection, search_id, status=status, ended_at=now(), result=body):
        raise no_search(search_id)


def no_search(search_id: str) -> UsageError:
    """The error for a search that the store does not hold."""
    return UsageError(f"the store holds no search {search_id!r}")


def exists(connection: Connection, search_id: str) -> bool:
    """Whether the store holds the search."""
    return bool(connection.scalar(select(SearchRow.search_id).where(SearchRow.search_id == search_id)))


def read(connection: Connection, reader: Reader, row: Row[*tuple[Any, ...]]) -> Search:
    """The search in a row of `SearchRow`'s columns; raises `StoreError` if the row makes no sense."""
    return Search(
        search_id=row.search_id,
        hardware=reader.hardware(connection, row.hardware_digest),
        stack=reader.stack(connection, row.stack_key),
        workload=reader.workload(connection, row.workload_key),
        request=row.request,
        status=row.status,
        result=row.result,
        started_at=row.started_at,
        ended_at=row.ended_at,
    )


def _change(connection: Connection, search_id: str, **values: Any) -> bool:
    query = update(SearchRow).where(SearchRow.search_id == search_id).values(**values)
    return connection.execute(query).rowcount == 1
