"""The store of trials and searches: everything that was ever measured, and the queries on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack
from uuid import uuid4

from sqlalchemy import ColumnElement, Connection, Select, false, func, null, select

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.errors import unknown
from autofit.core.frontier import Frontier
from autofit.core.lattice import Config
from autofit.core.outcome import Trial
from autofit.core.repeatability import between_executions
from autofit.core.workload import Workload
from autofit.store import attempts, contexts, ranking
from autofit.store.access import Access
from autofit.store.caches import Estimates, Probes
from autofit.store.database import schema
from autofit.store.database.address import Address
from autofit.store.database.engine import ROWS_AT_ONCE, Database, to_text
from autofit.store.ranking import Ranking
from autofit.store.rows import Reader, is_storable, storable
from autofit.store.searches.lease import Lease, is_held
from autofit.store.searches.queue import SearchQueue
from autofit.store.searches.search import Search
from autofit.store.searches.search import read as read_search
from autofit.store.tables import OF_CONTEXT, SearchRow, TrialRow, WorkloadRow

T = TypeVar("T")
RANKINGS = 200
"""Those of so many contexts that were asked about last are kept in memory, with some 2.8 kB for each attempt of a
config that decides a frontier."""


@dataclass(slots=True)
class Newest(Generic[T]):
    """What was read last of something that changes, with its version."""

    kept: tuple[str, T] | None = None

    def as_of(self, version: str, read: Callable[[], T]) -> T:
        """That of this version; `read` gives it, or a newer one."""
        kept = self.kept  # another thread may replace it
        if kept is None or kept[0] != version:
            self.kept = kept = version, read()
        return kept[1]


class OfContexts(TypedDict, total=False):
    """Conditions that contexts, and so their trials, must meet; one that is absent or None matches any."""

    hardware_key: str | None
    stack_key: str | None
    workload_key: str | None
    model: str | None
    """The workload's model."""
    workload: Mapping[str, float | str | Sequence[int]] | None
    """The values that other fields of the workload must have."""


class Conditions(OfContexts, total=False):
    """Conditions that trials must meet. Trials of one hardware have an index in their order, and so have those of one
    hardware, stack and workload."""

    outcome: str | None
    """The outcome's kind."""
    search_id: str | None
    own_step: bool | None
    """True for trials of autofit's own step alone, without those of users' programs; False matches any, too."""


class Store:
    """Trials and searches in SQLite or PostgreSQL.

    Every method works on the newest committed state and raises `StoreError` if the database fails. What a
    method returns is a value: changing it changes nothing here. Threads may share a store, and any number of
    processes may share a database; a forked child must open its own store.
    """

    def __init__(self, database: Database) -> None:
        """A store in a database that has the newest schema; `open` makes sure of that."""
        self._database = database
        self._reader = Reader()
        self._rankings: Callable[..., Newest[Ranking | None]] = lru_cache(maxsize=RANKINGS)(lambda **_: Newest())
        self._between: Callable[[str], Newest[float]] = lru_cache(maxsize=RANKINGS)(lambda _: Newest())
        self.queue = SearchQueue(database)
        """Changes searches."""
        self.access = Access(database)
        """Decides who may use the HTTP API."""
        self.estimates = Estimates(database)
        self.probes = Probes(database)

    @classmethod
    def open(cls, url: str | None = None, *, create: bool = True) -> Self:
        """The store at `url`: a path ending in .db, `sqlite:///PATH` or `postgresql://...`; None stands for
        AUTOFIT_STORE, or else SQLite in the user's data folder. An empty database becomes a store if `create` is set.
        Raises `UsageError` for a URL that is not understood, and `StoreError` if the store is absent, unreachable,
        locked, damaged, or of another schema."""
        database = Database(Address.of(url))
        try:
            schema.prepare(database, create=create)
        except BaseException:
            database.close()
            raise
        return cls(database)

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        """Where the store is, without any password."""
        return str(self._database.address)

    @property
    def url(self) -> str:
        """The URL that opens it in another process; with the password, if there is one."""
        return self._database.address.url.render_as_string(hide_password=False)

    @property
    def folder(self) -> Path | None:
        """The folder of a SQLite file; None for a server."""
        path = self._database.address.path
        return None if path is None else path.absolute().parent

    def add(self, trial: Trial, *, lease: Lease | None = None, uid: str | None = None) -> Trial:
        """Commits `trial`, as one of the search whose lease is given, and returns it with its `trial_id`. A further one
        of the same hardware, stack, workload, config and memory limit is the next attempt. A write with the `uid` of a
        committed one adds nothing: give one where a failed write is tried again. Raises `ValueError` for a trial that
        JSON or SQL cannot hold, and `LeaseLost`."""
        trial, write_uid = storable(trial), uid or uuid4().hex
        return replace(trial, trial_id=self._database.commit(lambda c: attempts.add(c, trial, lease, write_uid)))

    def set_aside(self, trial: Trial, reason: str, *, lease: Lease | None = None) -> None:
        """Stops counting a kept trial, because its device is not what its name says. It stays, with the reason. Raises
        `LeaseLost`."""
        self._database.commit(lambda c: attempts.set_aside(c, trial.set_aside(reason), lease))

    def add_new(self, trials: Iterable[Trial]) -> tuple[int, int]:
        """Keeps those of `trials` that are not stored with the same time and outcome, in batches of `ROWS_AT_ONCE`:
        other writers have their turn in between. Returns how many were added and how many repeated. Raises `ValueError`
        as `add` does, and what `trials` raises: earlier batches are kept."""
        added, repeated, remaining = 0, 0, map(storable, trials)
        while chunk := list(islice(remaining, ROWS_AT_ONCE)):
            new, old = self._database.commit(partial(attempts.add_new, trials=chunk))
            added, repeated = added + new, repeated + old
        return added, repeated

    def trial(self, trial_id: int) -> Trial | None:
        trials = self._all_trials(select(TrialRow).where(TrialRow.id == trial_id))
        return trials[0] if trials else None

    def trials(
        self,
        *,
        limit: int | None = None,
        before: int | None = None,
        newest_first: bool = False,
        **conditions: Unpack[Conditions],
    ) -> list[Trial]:
        """The trials that meet every given condition, all attempts, oldest first unless `newest_first` is set; at
        most `limit`. With `before`, only those with lower numbers. Raises `TypeError` for a condition that there is
        not."""
        _check(conditions, Conditions)
        clauses = _where(conditions) + ([] if before is None else [TrialRow.id < before])
        order = TrialRow.id.desc() if newest_first else TrialRow.id.asc()
        query = select(TrialRow).where(*clauses).order_by(order)
        if limit is not None:
            # The page is found by an index alone, so that the rows before it are never read.
            page = select(TrialRow.id).where(*clauses).order_by(order).limit(limit)
            query = select(TrialRow).where(TrialRow.id.in_(page)).order_by(order)
        return self._all_trials(query)

    def count(self, *, outcome: str | None = None, **conditions: Unpack[OfContexts]) -> int:
        """How many trials meet every given condition, all attempts. Raises `TypeError` for one that there is not."""
        _check(conditions, OfContexts)
        clauses = _of_contexts(conditions) + ([] if outcome is None else [TrialRow.outcome == outcome])
        counted = select(func.count()).select_from(TrialRow).where(*clauses)
        return self._database.fetch(lambda c: c.scalars(counted).one())

    def outcomes(self) -> dict[str, int]:
        """How many trials there are of each outcome."""
        counted = select(TrialRow.outcome, func.count()).group_by(TrialRow.outcome)
        return self._database.fetch(lambda c: {outcome: count for outcome, count in c.execute(counted)})

    def stream(self) -> Iterator[Trial]:
        """Every trial, oldest first, from one state of the store, without holding them all in memory."""
        return self._read_trials(select(TrialRow).order_by(TrialRow.id))

    def predicted(self, *, latest: int, hardware_key: str | None = None) -> Iterator[Trial]:
        """The latest so many trials that were predicted before they ran, on one hardware if given, newest first, in the
        manner of `stream`."""
        of_hardware = _where({"hardware_key": hardware_key})
        query = select(TrialRow).where(TrialRow.prediction.is_not(null()), *of_hardware)
        return self._read_trials(query.order_by(TrialRow.id.desc()).limit(latest))

    def attempts(
        self, *, hardware_key: str, stack_key: str, workload_key: str, search_id: str | None = None
    ) -> dict[Config, list[Trial]]:
        """All attempts of each config that was tried, oldest first; configs in order of their first trial. With
        `search_id`, only those of that search."""
        grouped: dict[Config, list[Trial]] = {}
        for trial in self.trials(
            hardware_key=hardware_key, stack_key=stack_key, workload_key=workload_key, search_id=search_id
        ):
            grouped.setdefault(trial.config, []).append(trial)
        return grouped

    def frontier(
        self, *, hardware_key: str, stack_key: str, workload_key: str, memory_limit_bytes: int | None = None
    ) -> Frontier | None:
        """The frontier, with each config represented by one trial (`core.verdict.standing`); None if nothing was tried.

        With `memory_limit_bytes`, configs are judged as a search under that limit judges them. How far speeds tie is as
        of the workload's last trial there. The frontier's `considered` points are those that no other of their family
        (`techniques.family`) beats. Its `trials` and `out_of_memory` count all attempts, its `contradictory` configs.
        """
        keys = {"hardware_key": hardware_key, "stack_key": stack_key, "workload_key": workload_key}

        newest = self._rankings(**keys)

        def read() -> Ranking | None:
            between, before = self.between_executions(hardware_key), newest.kept and newest.kept[1]
            return self._database.fetch(lambda c: ranking.of_context(c, self._reader, keys, between, before))

        ranked = newest.as_of(self.version(hardware_key=hardware_key, workload_key=workload_key), read)
        return None if ranked is None else ranked.frontier(memory_limit_bytes or 0)

    def between_executions(self, hardware_key: str) -> float:
        """How much executions of one config differ on one hardware, as its latest trials show
        (`repeatability.between_executions`)."""

        def read() -> float:
            return self._database.fetch(lambda c: between_executions(ranking.repeated_executions(c, hardware_key)))

        return self._between(hardware_key).as_of(self.version(hardware_key=hardware_key), read)

    def hardware(self) -> list[Hardware]:
        """The hardware that trials ran on, one per key, most recently used first."""
        return self._database.fetch(lambda c: [self._reader.hardware(c, key) for key in contexts.hardware(c)])

    def stacks(self, hardware_key: str, workload_key: str) -> list[Stack]:
        """The stacks that trials of this workload ran under on this hardware, most recently used first."""
        return self._database.fetch(
            lambda c: [self._reader.stack(c, key) for key in contexts.stacks(c, hardware_key, workload_key)]
        )

    def version(self, *, hardware_key: str | None = None, workload_key: str | None = None) -> str:
        """A text that differs once trials of this hardware and workload were added or set aside; of any, if one is not
        given."""
        return self._database.fetch(lambda c: contexts.version(c, hardware_key, workload_key))

    def workloads(self, *, model: str | None = None, hardware_key: str | None = None) -> list[Workload]:
        """The workloads that were tried, of one model or on one hardware if given, most recently used first."""
        if model is not None and not is_storable(model):  # databases refuse to compare with what they cannot hold
            return []
        return self._database.fetch(
            lambda c: [
                self._reader.workload(c, key) for key in contexts.workloads(c, model=model, hardware_key=hardware_key)
            ]
        )

    def search(self, search_id: str) -> Search | None:
        searches = self._read_searches(SearchRow.search_id == search_id)
        return searches[0] if searches else None

    def searches(
        self, *, stack_key: str | None = None, workload_key: str | None = None, limit: int | None = None
    ) -> list[Search]:
        """The searches under this stack and for this workload, where they are given; most recently begun first."""
        keys = ((SearchRow.stack_key, stack_key), (SearchRow.workload_key, workload_key))
        return self._read_searches(*(column == key for column, key in keys if key is not None), limit=limit)

    def _read_searches(self, *conditions: ColumnElement[bool], limit: int | None = None) -> list[Search]:
        def work(connection: Connection) -> list[Search]:
            query = select(SearchRow, is_held(connection).label("held")).where(*conditions).limit(limit)
            rows = connection.execute(query.order_by(SearchRow.started_at.desc(), SearchRow.search_id)).all()
            return [read_search(connection, self._reader, row) for row in rows]

        return self._database.fetch(work)

    def _all_trials(self, query: Select[*tuple[Any, ...]]) -> list[Trial]:
        return self._database.fetch(lambda c: [self._reader.trial(c, row) for row in c.execute(query)])

    def _read_trials(self, query: Select[*tuple[Any, ...]]) -> Iterator[Trial]:
        query = query.execution_options(yield_per=ROWS_AT_ONCE)
        with self._database.read() as connection, connection.execute(query) as rows:
            for row in rows:
                yield self._reader.trial(connection, row)


def _check(conditions: OfContexts, kind: type[OfContexts]) -> None:
    """Raises `TypeError` for a condition that `kind` does not have: to pass it by would answer another question."""
    for name in conditions.keys() - kind.__annotations__.keys():
        raise TypeError(str(unknown("condition", name, kind.__annotations__)))


def _where(conditions: Conditions) -> list[ColumnElement[bool]]:
    clauses = _of_contexts(conditions)
    values = {name: conditions.get(name) for name in ("outcome", "search_id")}
    clauses += [getattr(TrialRow, name) == value for name, value in values.items() if value is not None]
    if conditions.get("own_step"):
        clauses.append(ranking.of_own_step(TrialRow))
    return clauses


def _of_contexts(conditions: OfContexts) -> list[ColumnElement[bool]]:
    workload, model = conditions.get("workload") or {}, conditions.get("model")
    keys = {name: conditions.get(name) for name in OF_CONTEXT}
    clauses = [getattr(TrialRow, name) == value for name, value in keys.items() if value is not None]
    of_workload = [
        WorkloadRow.body[name].as_float() == float(value)
        if isinstance(value, int | float)
        else WorkloadRow.body[name].as_string() == (value if isinstance(value, str) else to_text(value))
        for name, value in workload.items()
    ]
    if model is not None:  # databases refuse to compare with what they cannot hold
        of_workload.append(WorkloadRow.model == model if is_storable(model) else false())
    if of_workload:
        clauses.append(TrialRow.workload_key.in_(select(WorkloadRow.key).where(*of_workload)))
    return clauses
