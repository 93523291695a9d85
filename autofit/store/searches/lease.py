"""The right to drive a search: what holds it, what every write under it must meet, and whose process has ended."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from sqlalchemy import ColumnElement, Connection, Double, cast, func, insert, or_, update

from autofit.core.document import Document
from autofit.core.errors import EnvironmentLacks, Interrupted
from autofit.store.rows import precise_now
from autofit.store.tables import EventRow, SearchRow, table_of

_NEW_EVENT = insert(table_of(EventRow))  # built once, because that takes longer than running it
LEASE_SECONDS = 30.0
"""How long a driver that says nothing keeps its search; it says so three times as often."""
ENDED: set[str] = set()
"""The owners in this process that no longer drive a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease(Document):
    """A search's right to run and to write. It is lost once the search has a higher epoch, or has ended."""

    search_id: str
    epoch: int
    owner: str
    """`new_owner` of whoever has taken it."""
    spent_seconds: float
    """This and the next: what earlier drivers have spent of the search's budget."""
    spent_trials: int


class LeaseLost(Interrupted):
    """The search was cancelled or taken over: nothing of it can be written under this lease any more."""

    def __init__(self, search_id: str) -> None:
        super().__init__(f"search {search_id} was cancelled or taken over by another driver; its trials are stored")


class UnderWay(EnvironmentLacks):
    """Another driver has the same search."""

    def __init__(self, search_id: str, owner: str) -> None:
        message = f"the same search is under way: {search_id}, driven by {owner}"
        super().__init__(message, remedy="let it end; the same command then answers from the store")


def new_owner() -> str:
    """Names a driver or a runner of this process: machine, process, the space of its number, and what no other has."""
    return f"{platform.node()}:{os.getpid()}:{pid_namespace()}-{uuid4().hex[:8]}"


def pid_namespace() -> int:
    """In which numbers of processes mean something: containers of one pod have one host name and not one of these. 0
    where the system has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def is_gone(owner: str) -> bool:
    """Whether the owner was a process of this machine and has ended, or a driver of this process that has. Where a
    machine's name misleads, epochs still keep two drivers apart."""
    beginning, _, rest = owner.rpartition(":")
    node, _, process = beginning.rpartition(":")
    is_here = node == platform.node() and rest.partition("-")[0] == str(pid_namespace())
    if not is_here or not process.isdecimal():
        return False
    if int(process) == os.getpid():
        return owner in ENDED
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return False


def clock(connection: Connection) -> ColumnElement[float]:
    """Seconds since 1970, by the database's clock: the machines of drivers may disagree."""
    if connection.dialect.name == "postgresql":
        return cast(func.extract("epoch", func.clock_timestamp()), Double)
    return (func.julianday("now") - 2440587.5) * 86400.0


def is_held(connection: Connection) -> ColumnElement[bool]:
    """The condition that a lease has not expired."""
    return SearchRow.lease_expires_at > clock(connection)


def is_active() -> ColumnElement[bool]:
    """The condition that a search has not ended."""
    return or_(SearchRow.state == "queued", SearchRow.state == "running")


def update_search(
    connection: Connection, search_id: str, *conditions: ColumnElement[bool], **values: Any
) -> int | None:
    """Changes a search if it meets the conditions; returns the number of the event that is to say so, or None."""
    changing = update(SearchRow).where(SearchRow.search_id == search_id, *conditions)
    numbered = changing.values(last_seq=SearchRow.last_seq + 1, **values).returning(SearchRow.last_seq)
    return connection.scalar(numbered)


def add_event(connection: Connection, search_id: str, seq: int, kind: str, body: Mapping[str, Any]) -> None:
    event = {"search_id": search_id, "seq": seq, "kind": kind, "at": precise_now(), "body": dict(body)}
    connection.execute(_NEW_EVENT, event)


def update_held_search(connection: Connection, lease: Lease, **values: Any) -> int:
    """`update_search` for the driver that holds the lease; raises `LeaseLost` for any other."""
    seq = update_search(connection, lease.search_id, *holds(lease), **values)
    if seq is None:
        raise LeaseLost(lease.search_id)
    return seq


def record_under_lease(connection: Connection, lease: Lease, kind: str, body: Mapping[str, Any], **values: Any) -> None:
    """Changes the search of a lease, and adds an event that says so; raises `LeaseLost`."""
    add_event(connection, lease.search_id, update_held_search(connection, lease, **values), kind, body)


def holds(lease: Lease) -> tuple[ColumnElement[bool], ...]:
    """The conditions that the lease is the newest of its search. One that has expired still holds until it is taken."""
    return SearchRow.search_id == lease.search_id, SearchRow.lease_epoch == lease.epoch, SearchRow.state == "running"
