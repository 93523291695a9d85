"""The life of searches in the store: asked for, claimed, renewed, given back, ended, cancelled."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, Row, and_, func, insert, or_, select, update

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.document import Document
from autofit.core.errors import EnvironmentLacks, UsageError, unknown
from autofit.core.outcome import seconds_since
from autofit.core.workload import Workload
from autofit.store.access import note
from autofit.store.database.engine import Database, to_text
from autofit.store.rows import check_text, keep, precise_now
from autofit.store.searches.lease import (
    LEASE_SECONDS,
    Lease,
    LeaseLost,
    UnderWay,
    clock,
    holds,
    is_active,
    is_gone,
    is_held,
    number,
    own_number,
    tell,
)
from autofit.store.searches.search import ENDINGS
from autofit.store.tables import EventRow, HardwareRow, SearchRow

MOST_WAITING = 100
"""Searches that may be queued at once: at ten minutes each, a day's work of a runner is less."""


class KeyReused(UsageError):
    """An idempotency key was given before, with another request."""


class QueueFull(EnvironmentLacks):
    """Too many searches wait already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Document):
    """Something that happened in a search."""

    seq: int
    """1 for the first event of the search; there are no gaps."""
    kind: str
    """A state that the search has entered, or `trial`."""
    at: str
    """When, ISO 8601 in UTC."""
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """How the searches of a store are doing."""

    searches: Mapping[str, int]
    """State -> number of searches."""
    waited_seconds: float
    """How long the first queued search has waited; 0 if none does."""
    lease_age_seconds: float
    """Since the least recent renewal of a running search's lease; 0 if none runs."""


class SearchQueue:
    """The searches of a store. A driver writes only under its lease: others raise `LeaseLost`, and change nothing."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def submit(
        self,
        *,
        digest: str,
        workload: Workload,
        request: Mapping[str, Any],
        hardware_name: str,
        key: str | None = None,
        by: str | None = None,
        campaign_id: str | None = None,
    ) -> str:
        """Queues a search for a runner with this hardware, and returns its id; or that of the queued or running search
        with the same `digest`, or of the one that was asked for with the same `key`; an empty one is none.

        `by` names the token that asks, for the audit. Raises `KeyReused` if that one's digest is another,
        and `QueueFull`.
        """
        search_id, new = uuid4().hex, {"digest": digest, "hardware_name": hardware_name, "campaign_id": campaign_id}
        new["idempotency_key"] = key or None
        to_text(dict(request))

        def found_or_made(connection: Connection) -> str:
            asked = select(SearchRow.search_id, SearchRow.digest)
            known = key and connection.execute(asked.where(SearchRow.idempotency_key == key)).one_or_none()
            known = known or connection.execute(asked.where(SearchRow.digest == digest, is_active())).one_or_none()
            if not known:
                waiting = select(func.count()).select_from(SearchRow).where(SearchRow.state == "queued")
                if (connection.scalar(waiting) or 0) >= MOST_WAITING:
                    raise QueueFull(f"{MOST_WAITING} searches wait already", remedy="wait, or cancel one of them")
                refers = keep(connection, workload=workload)
                _insert(connection, search_id=search_id, request=dict(request), last_seq=1, **new, **refers)
                tell(connection, search_id, 1, "queued", {"hardware": hardware_name})
                return search_id
            if known.digest != digest:
                raise KeyReused(f"the idempotency key {key!r} was used for another request")
            return str(known.search_id)

        def work(connection: Connection) -> str:
            found = found_or_made(connection)
            note(connection, by, "search", found)
            return found

        return self._database.commit(work)

    def claim(
        self, owner: str, hardware: Collection[str] | None = None, *, search_id: str | None = None
    ) -> Lease | None:
        """The lease of the search that has waited longest for one of this hardware (None: for any), or whose driver has
        gone; None if there is none. With `search_id`, of that search alone."""

        def work(connection: Connection) -> Lease | None:
            running = SearchRow.state == "running"
            gone = [o for o in connection.scalars(select(SearchRow.lease_owner).where(running)) if o and is_gone(o)]
            left = and_(running, or_(~is_held(connection), SearchRow.lease_owner.in_(gone)))
            name = SearchRow.hardware_name
            ours = name.is_not(None) if hardware is None else name.in_(hardware)
            waiting = select(SearchRow).where(ours, or_(SearchRow.state == "queued", left))
            if search_id is not None:
                waiting = waiting.where(SearchRow.search_id == search_id)
            first = waiting.order_by(SearchRow.started_at, SearchRow.search_id).limit(1)
            row = connection.execute(first.with_for_update(skip_locked=True)).one_or_none()
            return None if row is None else _taken(connection, row, owner)

        return self._database.commit(work)

    def begin(
        self,
        search_id: str,
        owner: str,
        *,
        digest: str,
        hardware: Hardware,
        stack: Stack,
        workload: Workload,
        request: Mapping[str, Any],
        campaign_id: str | None = None,
    ) -> Lease:
        """The lease of a search that this process drives: of the one with this id if `owner` has claimed it, of the
        queued or running one with the same `digest` if its driver has gone, or of one with this id that is not driven,
        which is stored if it is new.

        Raises `UnderWay` if another driver has it, and `ValueError` if the request holds NaN or infinity.
        """
        check_text(search_id, "the search's id")
        to_text(dict(request))

        def work(connection: Connection) -> Lease:
            query = select(SearchRow, is_held(connection).label("held")).with_for_update()
            by_id = query.where(SearchRow.search_id == search_id)
            row = connection.execute(by_id).one_or_none()
            if row is None or row.lease_owner != owner:
                same = query.where(SearchRow.digest == digest, is_active())
                row = connection.execute(same).one_or_none() or row
            refers = keep(connection, hardware, stack, workload)
            if row is None:
                _insert(connection, search_id=search_id, digest=digest, request={}, campaign_id=campaign_id, **refers)
                row = connection.execute(by_id).one()
            told = {"request": {**row.request, **request}, **refers}
            if row.state == "running" and row.lease_owner == owner:
                _write(connection, _lease(row), "planned", {}, **told)
                return _lease(row)
            if row.state == "running" and row.held and not is_gone(row.lease_owner):
                raise UnderWay(row.search_id, row.lease_owner)
            anew = {"spent_seconds": 0.0, "spent_trials": 0} if row.state in ENDINGS else {}
            return _taken(connection, row, owner, digest=digest, **told, **anew)

        return self._database.commit(work)

    def renew(self, lease: Lease, spent_seconds: float) -> None:
        """Keeps a lease for another `LEASE_SECONDS`, and stores what the search has spent."""

        def work(connection: Connection) -> None:
            expires = clock(connection) + LEASE_SECONDS
            renewed = update(SearchRow).where(*holds(lease))
            if not connection.execute(renewed.values(lease_expires_at=expires, spent_seconds=spent_seconds)).rowcount:
                raise LeaseLost(lease.search_id)

        self._database.commit(work)

    def is_held(self, lease: Lease) -> bool:
        """Whether a lease is still its search's."""
        query = select(SearchRow.search_id).where(*holds(lease))
        return self._database.fetch(lambda c: c.scalar(query)) is not None

    def give_back(self, lease: Lease, because: str, *, died: bool = False) -> None:
        """Queues a search again whose driver has been interrupted, or has `died` of itself."""
        back = {"state": "queued", "lease_owner": None, "lease_expires_at": None}
        body = {"because": because, **({"died": True} if died else {})}
        self._database.commit(lambda c: _write(c, lease, "queued", body, **back))

    def deaths(self, search_id: str) -> int:
        """How often a search was given back because its driver had died."""
        back = select(EventRow.body).where(EventRow.search_id == search_id, EventRow.kind == "queued")
        bodies = self._database.fetch(lambda c: c.scalars(back).all())
        return sum("died" in body for body in bodies)

    def end(self, lease: Lease, state: str, result: Mapping[str, Any] | None) -> None:
        """Stores how a search ended and what it answered.

        Raises `UsageError` for a state that is no ending, and `ValueError` if the result holds NaN or infinity.
        """
        if state not in ENDINGS:
            raise unknown("ending of a search", state, ENDINGS)
        body = None if result is None else dict(result)
        to_text(body)
        no_lease = {"lease_owner": None, "lease_expires_at": None}
        ended = {"state": state, "ended_at": precise_now(), "result": body, **no_lease}

        def work(connection: Connection) -> None:
            same = SearchRow.search_id == lease.search_id, SearchRow.lease_epoch == lease.epoch
            if connection.scalar(select(SearchRow.state).where(*same)) != state:  # else this was committed before
                _write(connection, lease, state, body or {}, **ended)

        self._database.commit(work)

    def cancel(self, search_id: str, *, by: str | None = None) -> None:
        """Ends a search that is queued or running: its driver can write nothing more, and ends what it runs. `by` names
        the token that asks, for the audit.

        Raises `UsageError` if there is no such search; one that has ended stays as it is.
        """

        def work(connection: Connection) -> None:
            if connection.scalar(select(SearchRow.search_id).where(SearchRow.search_id == search_id)) is None:
                raise UsageError(f"the store holds no search {search_id!r}")
            seq = number(connection, search_id, is_active(), state="cancelled", ended_at=precise_now())
            if seq is not None:
                tell(connection, search_id, seq, "cancelled", {})
                note(connection, by, "cancel", search_id)

        self._database.commit(work)

    def events(self, search_id: str, *, after: int = 0) -> list[Event]:
        """The events of a search whose numbers are higher than `after`, in order."""
        later = select(EventRow).where(EventRow.search_id == search_id, EventRow.seq > after).order_by(EventRow.seq)
        rows = self._database.fetch(lambda c: c.execute(later).all())
        return [Event(seq=row.seq, kind=row.kind, at=row.at, body=row.body) for row in rows]

    def status(self) -> QueueStatus:
        def work(connection: Connection) -> QueueStatus:
            counted = select(SearchRow.state, func.count()).group_by(SearchRow.state)
            first = select(func.min(SearchRow.started_at)).where(SearchRow.state == "queued")
            running = SearchRow.state == "running"
            oldest = select(func.max(clock(connection) - SearchRow.lease_expires_at + LEASE_SECONDS)).where(running)
            waits_since = connection.scalar(first)
            return QueueStatus(
                searches={state: count for state, count in connection.execute(counted)},
                waited_seconds=seconds_since(waits_since) if waits_since else 0.0,
                lease_age_seconds=max(connection.scalar(oldest) or 0.0, 0.0),
            )

        return self._database.fetch(work)

    def announce(self, hardware: Hardware) -> None:
        """Makes hardware known that a runner has."""
        self._database.commit(lambda c: keep(c, hardware))

    def hardware_names(self) -> list[str]:
        """Names of the hardware that trials ran on or that a runner has had, in alphabetical order."""
        names = select(HardwareRow.name).distinct().order_by(HardwareRow.name)
        return list(self._database.fetch(lambda c: c.scalars(names).all()))


def _insert(connection: Connection, **values: Any) -> None:
    connection.execute(insert(SearchRow).values(state="queued", started_at=precise_now(), **values))


def _write(connection: Connection, lease: Lease, kind: str, body: Mapping[str, Any], **values: Any) -> None:
    """Changes a search under its lease, and says so in an event; raises `LeaseLost`."""
    tell(connection, lease.search_id, own_number(connection, lease, **values), kind, body)


def _taken(connection: Connection, row: Row[*tuple[Any, ...]], owner: str, **values: Any) -> Lease:
    epoch = row.lease_epoch + 1
    own = {"lease_owner": owner, "lease_epoch": epoch, "lease_expires_at": clock(connection) + LEASE_SECONDS}
    seq = number(connection, row.search_id, state="running", ended_at=None, result=None, **own, **values)
    tell(connection, row.search_id, seq or 0, "running", {"epoch": epoch, "driver": owner})
    return _lease(connection.execute(select(SearchRow).where(SearchRow.search_id == row.search_id)).one())


def _lease(row: Row[*tuple[Any, ...]]) -> Lease:
    return Lease(
        search_id=row.search_id,
        epoch=row.lease_epoch,
        owner=row.lease_owner,
        spent_seconds=row.spent_seconds,
        spent_trials=row.spent_trials,
        is_runners=row.hardware_name is not None,
    )
