"""The life of searches in the store: submitted, claimed, renewed, given back, ended, cancelled."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from sqlalchemy import ColumnElement, Connection, Row, and_, func, insert, or_, select, update

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.document import Document
from autofit.core.errors import EnvironmentLacks, UsageError, unknown
from autofit.core.outcome import seconds_since
from autofit.core.workload import Workload
from autofit.store.access import add_audit, askers
from autofit.store.database.engine import Database, to_text
from autofit.store.rows import check_text, keep, precise_now
from autofit.store.searches.lease import (
    LEASE_SECONDS,
    Lease,
    LeaseLost,
    UnderWay,
    add_event,
    clock,
    holds,
    is_active,
    is_gone,
    is_held,
    record_under_lease,
    update_search,
)
from autofit.store.searches.search import ENDINGS
from autofit.store.tables import AuditRow, EventRow, HardwareRow, KeyRow, SearchRow

MOST_WAITING = 100
"""Searches of one token that may be queued at once: at ten minutes each, a day's work of a runner is less."""
_NO_LEASE = {"lease_owner": None, "lease_expires_at": None}


class KeyReused(UsageError):
    """An idempotency key was given before, with another request."""


class QueueFull(EnvironmentLacks):
    """Too many searches of this token wait already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Document):
    """Something that happened in a search."""

    seq: int
    """1 for the first event of the search; there are no gaps."""
    kind: str
    """A state that the search has entered, or news: `planned`, `trial`, `set_aside` (docs/reference/http.md)."""
    at: str
    """When, ISO 8601 in UTC."""
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """The state of the searches of a store."""

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
        """Queues a search for a runner with this hardware, and returns its id.

        If this token has given the same `key` before, or a search with the same `digest` is queued or running, returns
        the id of that one. Runners may then take it even if a command line began it. An empty key is none. `by` names
        the token that asks, for the audit. Raises `KeyReused` if the key was given with another digest, and
        `QueueFull`.
        """
        search_id, new = uuid4().hex, {"digest": digest, "hardware_name": hardware_name, "campaign_id": campaign_id}
        to_text(dict(request))

        def create(connection: Connection) -> str:
            last = select(func.max(AuditRow.id)).where(AuditRow.token == by).group_by(AuditRow.search_id)
            asked = select(AuditRow.search_id).where(AuditRow.id.in_(last), AuditRow.action == "search")
            waiting = select(func.count()).where(SearchRow.state == "queued", SearchRow.search_id.in_(asked))
            if (connection.scalar(waiting) or 0) >= MOST_WAITING:
                raise QueueFull(f"{MOST_WAITING} of your searches wait already", remedy="wait, or cancel one of them")
            references = keep(connection, workload=workload)
            _insert(connection, search_id=search_id, request=dict(request), last_seq=1, **new, **references)
            add_event(connection, search_id, 1, "queued", {"hardware": hardware_name})
            return search_id

        def find_or_create(connection: Connection) -> str:
            given = {"token": by or "", "key": key}
            of_key = select(KeyRow.digest, KeyRow.search_id).filter_by(**given)
            row = connection.execute(of_key).one_or_none() if key else None
            if row is not None:
                if row.digest != digest:
                    raise KeyReused(f"the idempotency key {key!r} was used for another request")
                return str(row.search_id)
            submitted = _join(connection, digest, hardware_name, request) or create(connection)
            add_audit(connection, by, "search", submitted)
            if key:
                connection.execute(insert(KeyRow).values(digest=digest, search_id=submitted, **given))
            return submitted

        return self._database.commit(find_or_create)

    def claim(
        self, owner: str, hardware: Collection[str] | None = None, *, search_id: str | None = None
    ) -> Lease | None:
        """Claims the search that has waited longest for one of this hardware (None: for any), or whose driver has gone.
        Returns its lease; None if there is no such search. With `search_id`, considers that search alone."""

        def work(connection: Connection) -> Lease | None:
            waiting = select(SearchRow).where(_waits(connection))
            if hardware is not None:
                waiting = waiting.where(SearchRow.hardware_name.in_(hardware))
            if search_id is not None:
                waiting = waiting.where(SearchRow.search_id == search_id)
            first = waiting.order_by(SearchRow.started_at, SearchRow.search_id).limit(1)
            row = connection.execute(first.with_for_update(skip_locked=True)).one_or_none()
            return None if row is None else _take_over(connection, row, owner)

        return self._database.commit(work)

    def hardware_waited_for(self) -> list[str]:
        """The names of the hardware for which searches wait that `claim` could return."""
        names = select(SearchRow.hardware_name).distinct()
        found = self._database.fetch(lambda c: c.scalars(names.where(_waits(c))).all())
        return [name for name in found if name is not None]

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
        """The lease of a search that this process drives from now on.

        It is the one with this id if `owner` has claimed it; else the queued or running one with the same `digest`, if
        its driver has gone; else the one with this id that nobody drives, which is stored if it is new.
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
            references = keep(connection, hardware, stack, workload)
            if row is None:
                _insert(
                    connection, search_id=search_id, digest=digest, request={}, campaign_id=campaign_id, **references
                )
                row = connection.execute(by_id).one()
            values = {"request": {**row.request, **request}, **references}
            if row.state == "running" and row.lease_owner == owner:
                record_under_lease(connection, _lease(row), "planned", {}, **values)
                return _lease(row)
            if row.state == "running" and row.held and not is_gone(row.lease_owner):
                raise UnderWay(row.search_id, row.lease_owner)
            anew = {"spent_seconds": 0.0, "spent_trials": 0, "hardware_name": None}
            restart = anew if row.state in ENDINGS else {}
            return _take_over(connection, row, owner, digest=digest, **values, **restart)

        return self._database.commit(work)

    def renew(self, lease: Lease, spent_seconds: float) -> None:
        """Extends a lease by `LEASE_SECONDS` from now, and stores what the search has spent."""

        def work(connection: Connection) -> None:
            expires = clock(connection) + LEASE_SECONDS
            renewed = update(SearchRow).where(*holds(lease))
            if not connection.execute(renewed.values(lease_expires_at=expires, spent_seconds=spent_seconds)).rowcount:
                raise LeaseLost(lease.search_id)

        self._database.commit(work)

    def is_held(self, lease: Lease) -> bool:
        """Whether a lease is still the current one of its search."""
        query = select(SearchRow.search_id).where(*holds(lease))
        return self._database.fetch(lambda c: c.scalar(query)) is not None

    def give_back(self, lease: Lease, because: str, *, died: bool = False) -> None:
        """Queues a search again after its driver was interrupted, or `died` by itself."""
        body = {"because": because, **({"died": True} if died else {})}
        self._database.commit(lambda c: _requeue(c, lease, body))

    def interrupt(self, lease: Lease, result: Mapping[str, Any]) -> None:
        """Queues a search again whose driver was interrupted; ends it as cancelled, with this result, if no runner may
        take it. Raises `ValueError` if the result holds NaN or infinity."""
        ended = {"state": "cancelled", "ended_at": precise_now(), "result": dict(result), **_NO_LEASE}
        to_text(ended["result"])

        def work(connection: Connection) -> None:
            # Locked: until this is committed, nobody joins it.
            named = select(SearchRow.hardware_name).where(SearchRow.search_id == lease.search_id).with_for_update()
            if connection.scalar(named) is not None:
                _requeue(connection, lease, {"because": "its driver was interrupted"})
            else:
                record_under_lease(connection, lease, "cancelled", result, **ended)

        self._database.commit(work)

    def deaths(self, search_id: str) -> int:
        """How often a search was given back because its driver had died."""
        query = select(EventRow.body).where(EventRow.search_id == search_id, EventRow.kind == "queued")
        bodies = self._database.fetch(lambda c: c.scalars(query).all())
        return sum("died" in body for body in bodies)

    def end(self, lease: Lease, state: str, result: Mapping[str, Any] | None) -> None:
        """Stores how a search ended, and its result. Raises `UsageError` for a state that is no ending, and
        `ValueError` if the result holds NaN or infinity."""
        if state not in ENDINGS:
            raise unknown("ending of a search", state, ENDINGS)
        body = None if result is None else dict(result)
        to_text(body)
        ended = {"state": state, "ended_at": precise_now(), "result": body, **_NO_LEASE}

        def work(connection: Connection) -> None:
            same = SearchRow.search_id == lease.search_id, SearchRow.lease_epoch == lease.epoch
            if connection.scalar(select(SearchRow.state).where(*same)) != state:  # else this was committed before
                record_under_lease(connection, lease, state, body or {}, **ended)

        self._database.commit(work)

    def cancel(self, search_id: str, *, by: str | None = None, for_all: bool = True) -> None:
        """Ends a search that is queued or running: its driver can write nothing more, and ends what it runs. `by` names
        the token that asks, for the audit. Unless `for_all`, that token withdraws: the search goes on while other
        tokens, or the command line that drives it, ask for it.

        Raises `UsageError` if there is no such search; one that has ended stays as it is.
        """

        def work(connection: Connection) -> None:
            query = select(SearchRow.state).where(SearchRow.search_id == search_id).with_for_update()
            state = connection.scalar(query)
            if state is None:
                raise UsageError(f"the store holds no search {search_id!r}")
            if state in ENDINGS:
                return
            add_audit(connection, by, "cancel", search_id)
            if not for_all and askers(connection, search_id):
                return
            if not for_all and _is_on_command_line(connection, search_id):
                alone = update(SearchRow).where(SearchRow.search_id == search_id)
                connection.execute(alone.values(hardware_name=None))  # no runner is to take it on any more
            else:
                seq = update_search(connection, search_id, state="cancelled", ended_at=precise_now())
                add_event(connection, search_id, seq or 0, "cancelled", {})

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
        """Stores hardware that a runner has."""
        self._database.commit(lambda c: keep(c, hardware))

    def hardware_names(self) -> list[str]:
        """Names of the hardware that trials ran on or that a runner has had, in alphabetical order."""
        names = select(HardwareRow.name).distinct().order_by(HardwareRow.name)
        return list(self._database.fetch(lambda c: c.scalars(names).all()))


def _waits(connection: Connection) -> ColumnElement[bool]:
    """Which searches a runner may claim: those that are queued, and those whose driver has gone."""
    running = SearchRow.state == "running"
    owners = connection.scalars(select(SearchRow.lease_owner).where(running))
    gone_owners = [owner for owner in owners if owner and is_gone(owner)]
    abandoned = and_(running, or_(~is_held(connection), SearchRow.lease_owner.in_(gone_owners)))
    return and_(SearchRow.hardware_name.is_not(None), or_(SearchRow.state == "queued", abandoned))


def _join(connection: Connection, digest: str, hardware_name: str, request: Mapping[str, Any]) -> str | None:
    """The id of the search that is queued or running for the same; None if there is none."""
    query = select(SearchRow.search_id, SearchRow.hardware_name, SearchRow.request)
    row = connection.execute(query.where(SearchRow.digest == digest, is_active()).with_for_update()).one_or_none()
    if row is None:
        return None
    if row.hardware_name is None:  # a command line began it, whose process may end before the search does
        taken_on = {"hardware_name": hardware_name, "request": {**row.request, **request}}
        connection.execute(update(SearchRow).where(SearchRow.search_id == row.search_id).values(taken_on))
    return str(row.search_id)


def _is_on_command_line(connection: Connection, search_id: str) -> bool:
    """Whether the command line that began a search has driven it ever since."""
    query = select(SearchRow.lease_owner).where(SearchRow.search_id == search_id, SearchRow.lease_epoch == 1)
    owner = connection.scalar(query.where(SearchRow.state == "running", is_held(connection)))
    # Whoever submits a search queues it first.
    began = select(EventRow.kind).where(EventRow.search_id == search_id, EventRow.seq == 1)
    return owner is not None and not is_gone(owner) and connection.scalar(began) == "running"


def _insert(connection: Connection, **values: Any) -> None:
    connection.execute(insert(SearchRow).values(state="queued", started_at=precise_now(), **values))


def _requeue(connection: Connection, lease: Lease, body: Mapping[str, Any]) -> None:
    record_under_lease(connection, lease, "queued", body, state="queued", **_NO_LEASE)


def _take_over(connection: Connection, row: Row[*tuple[Any, ...]], owner: str, **values: Any) -> Lease:
    epoch = row.lease_epoch + 1
    lease_values = {"lease_owner": owner, "lease_epoch": epoch, "lease_expires_at": clock(connection) + LEASE_SECONDS}
    seq = update_search(
        connection, row.search_id, state="running", ended_at=None, result=None, **lease_values, **values
    )
    add_event(connection, row.search_id, seq or 0, "running", {"epoch": epoch, "driver": owner})
    return _lease(connection.execute(select(SearchRow).where(SearchRow.search_id == row.search_id)).one())


def _lease(row: Row[*tuple[Any, ...]]) -> Lease:
    return Lease(
        search_id=row.search_id,
        epoch=row.lease_epoch,
        owner=row.lease_owner,
        spent_seconds=row.spent_seconds,
        spent_trials=row.spent_trials,
    )
