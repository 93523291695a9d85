"""Turns values into rows and rows into values: which column holds which part of a trial.

`attempts` fills the columns that a write adds: the number of the attempt and the search.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import Connection, Insert, Row, Select, bindparam, insert, inspect, select
from sqlalchemy.dialects import postgresql, sqlite

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.state import DeviceState
from autofit.core.errors import StoreError
from autofit.core.lattice import Config
from autofit.core.outcome import Fits, Trial, outcome_from_json
from autofit.core.prediction import Prediction
from autofit.core.units import LARGEST_INTEGER
from autofit.core.workload import METHODS, Workload, digest
from autofit.store.database.engine import to_text
from autofit.store.tables import Base, HardwareRow, StackRow, WorkloadRow, table_of
from autofit.techniques import family

V = TypeVar("V", Hardware, Stack, Workload)
Values = dict[str, Any]
"""A row's columns by name."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def precise_now() -> str:
    """The time for the store's own notes and the order of searches: ISO 8601 in UTC, with microseconds."""
    return datetime.now(UTC).isoformat()


def keep(
    connection: Connection,
    hardware: Hardware | None = None,
    stack: Stack | None = None,
    workload: Workload | None = None,
) -> dict[str, str]:
    """Stores the given values that are not yet there; returns the columns that refer to them. Every writer takes the
    tables in this order, so that no two deadlock."""
    rows: dict[str, tuple[str, Values]] = {}
    if hardware is not None:
        body = hardware.to_json()
        # The digest is of the whole value; `Hardware.key` leaves out what changes neither memory nor speed.
        identity = {"digest": digest(body), "key": hardware.key, "name": hardware.name}
        rows["hardware_digest"] = "digest", {**identity, "body": body}
    if stack is not None:
        rows["stack_key"] = "key", {"key": stack.key, "body": replace(stack, driver=None).to_json()}
    if workload is not None:
        identity = {"key": workload.key, "model": workload.model}
        rows["workload_key"] = "key", {**identity, "body": workload.to_json()}
    for reference, (column, values) in rows.items():
        stored, adding = _KEPT[reference]
        if connection.scalar(stored, {"value": values[column]}) is None:
            connection.execute(adding, values)
    return {reference: values[column] for reference, (column, values) in rows.items()}


def put(connection: Connection, table: type[Base], rows: Sequence[Values]) -> None:
    """Stores the rows in place of those with the same primary keys."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    insertion = insert(table)
    columns = inspect(table).local_table.columns
    new_values = {column.name: insertion.excluded[column.name] for column in columns if not column.primary_key}
    keys = [column for column in columns if column.primary_key]
    connection.execute(insertion.on_conflict_do_update(index_elements=keys, set_=new_values), rows)


def is_storable(text: str) -> bool:
    """Whether every database can hold `text`."""
    return "\0" not in text and not _SURROGATE.search(text)


def check_text(text: str, what: str) -> str:
    """`text` if every database can hold it; raises `ValueError` otherwise."""
    if not is_storable(text):
        raise ValueError(f"{what} holds a character that no database can store: {text!r}")
    return text


def storable(trial: Trial) -> Trial:
    """`trial` with U+FFFD for anything in its outcome that is not Unicode: a process may print arbitrary bytes."""
    if isinstance(trial.outcome, Fits):
        return trial
    evidence = trial.outcome.to_json()
    texts = {name: value for name, value in evidence.items() if isinstance(value, str)}
    if not any(map(_SURROGATE.search, texts.values())):
        return trial
    replaced = {name: _SURROGATE.sub("\ufffd", value) for name, value in texts.items()}
    return replace(trial, outcome=outcome_from_json({**evidence, **replaced}))


def trial_values(trial: Trial) -> Values:
    """The columns of `trial` itself: not its attempt, its search, or its rows in other tables. Raises `ValueError` for
    NaN and infinity, a time without a zone, a config without a method, integers beyond 64 bits."""
    evidence = trial.outcome.to_json()
    prediction = None if trial.prediction is None else trial.prediction.to_json()
    state = None if trial.device_state is None else trial.device_state.to_json()
    try:
        to_text([evidence, prediction, state, trial.seconds, trial.config.to_json(), trial.hardware.to_json()])
    except ValueError:
        raise ValueError("a number is NaN or infinite, which JSON cannot express") from None
    method = trial.config.get("method")
    if method not in METHODS:
        raise ValueError(f"the config's method is {method!r}, not one of {', '.join(METHODS)}")
    if datetime.fromisoformat(trial.recorded_at).tzinfo is None:
        raise ValueError(f"recorded_at {trial.recorded_at!r} has no time zone")
    check_text(trial.workload.model, "the model's name")
    check_text(trial.hardware.name, "the hardware's name")
    measurement = trial.measurement
    values = {
        "hardware_key": trial.hardware.key,
        "config_key": trial.config.key,
        "memory_limit_bytes": trial.memory_limit_bytes,
        "family": family(trial.config),
        "outcome": trial.outcome.kind,
        "stopped_early": measurement is not None and measurement.stopped_early,
        "device_bytes": measurement and measurement.device_bytes,
        "tokens_per_second": measurement and measurement.tokens_per_second,
        "seconds": trial.seconds,
        "recorded_at": trial.recorded_at,
        "config": trial.config.to_json(),
        "evidence": evidence,
        "prediction": prediction,
        "device_state": state,
        "suspect": bool(trial.doubts),
        "node": trial.node,
        "driver": trial.stack.driver,
    }
    for name, value in values.items():
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            raise ValueError(f"{name} is {value}: beyond 64 bits")
    return values


def _kept(model: type[Base]) -> tuple[Select[*tuple[Any, ...]], Insert]:
    """The statements that look for a value by its primary key, and that add it: built once, as in `attempts`."""
    table = table_of(model)
    (primary,) = table.primary_key
    return select(primary).where(primary == bindparam("value")), insert(table)


_KEPT = {
    "hardware_digest": _kept(HardwareRow),
    "stack_key": _kept(StackRow),
    "workload_key": _kept(WorkloadRow),
}


class Reader:
    """Reads trials. Remembers the few hardware, stack and workload values that all of them share."""

    def __init__(self) -> None:
        self._values: dict[tuple[type, str], Any] = {}

    def hardware(self, connection: Connection, key: str) -> Hardware:
        """The hardware whose full value has this digest."""
        return self._value(connection, Hardware, HardwareRow, "digest", key)

    def stack(self, connection: Connection, key: str, driver: str | None = None) -> Stack:
        stack = self._value(connection, Stack, StackRow, "key", key)
        return stack if driver is None else replace(stack, driver=driver)

    def workload(self, connection: Connection, key: str) -> Workload:
        return self._value(connection, Workload, WorkloadRow, "key", key)

    def _value(self, connection: Connection, kind: type[V], table: type[Base], column: str, key: str) -> V:
        if (kind, key) not in self._values:
            # Only then: building a statement takes longer than reading a trial, which needs three values.
            columns = table.__table__.c
            body = connection.scalar(select(columns["body"]).where(columns[column] == key))
            with readable(f"value {key}"):
                self._values[kind, key] = kind.from_json(body or {})
        value: V = self._values[kind, key]
        return value

    def trial(self, connection: Connection, row: Row[*tuple[Any, ...]]) -> Trial:
        """The trial in a row that has the columns of `TrialRow`; raises `StoreError` if the row makes no sense."""
        with readable(f"trial {row.id}"):
            return Trial(
                config=Config.from_json(row.config),
                workload=self.workload(connection, row.workload_key),
                hardware=self.hardware(connection, row.hardware_digest),
                stack=self.stack(connection, row.stack_key, row.driver),
                memory_limit_bytes=row.memory_limit_bytes,
                outcome=outcome_from_json(row.evidence),
                seconds=row.seconds,
                recorded_at=row.recorded_at,
                trial_id=row.id,
                prediction=None if row.prediction is None else Prediction.from_json(row.prediction),
                device_state=None if row.device_state is None else DeviceState.from_json(row.device_state),
            )


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Raises `StoreError` where what is read makes no sense."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{what} of the store cannot be read: {error}", remedy="look at the store with `autofit db check`"
        ) from None
