"""The tables of a store as typed models, in the newest form of what `database/migrations/` builds step by step."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Body = dict[str, Any]
"""A JSON object."""

# In SQLite only INTEGER is an alias of the row id; PostgreSQL's INTEGER ends at 2**31.
_Id = BigInteger().with_variant(Integer(), "sqlite")

# Migrations drop constraints by name, so every constraint needs the same name on every backend.
_NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_name)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}
_ACTIVE = text("state IN ('queued', 'running')")


class Base(DeclarativeBase):
    """The models' common base. JSON is kept as text, which returns every number as it was written."""

    metadata = MetaData(naming_convention=_NAMES)
    type_annotation_map = {Body: JSON, float: Double}  # noqa: RUF012 (the declarative base's own attribute)


class HardwareRow(Base):
    """A `Hardware` value. `key` covers only what changes memory or speed, so several rows may share one."""

    __tablename__ = "hardware"

    digest: Mapped[str] = mapped_column(primary_key=True)
    """Digest of the whole body."""
    key: Mapped[str] = mapped_column(index=True)
    name: Mapped[str]
    body: Mapped[Body]


class StackRow(Base):
    """A `Stack` value, without the driver: that is noted with each trial."""

    __tablename__ = "stacks"

    key: Mapped[str] = mapped_column(primary_key=True)
    """`Stack.key`, which covers the whole body."""
    body: Mapped[Body]


class WorkloadRow(Base):
    """A `Workload` value."""

    __tablename__ = "workloads"

    key: Mapped[str] = mapped_column(primary_key=True)
    """`Workload.key`, which covers the whole body."""
    model: Mapped[str] = mapped_column(index=True)
    body: Mapped[Body]


class SearchRow(Base):
    """A search: what it was asked, its state, who drives it, and what it answered (docs/internals/searches.md)."""

    __tablename__ = "searches"
    __table_args__ = (
        Index("uq_searches_digest", "digest", unique=True, sqlite_where=_ACTIVE, postgresql_where=_ACTIVE),
        Index("ix_searches_state", "state", "started_at"),
    )

    search_id: Mapped[str] = mapped_column(primary_key=True)
    hardware_digest: Mapped[str | None] = mapped_column(ForeignKey("hardware.digest"))
    """This and the next are None until a driver has begun."""
    stack_key: Mapped[str | None] = mapped_column(ForeignKey("stacks.key"))
    workload_key: Mapped[str] = mapped_column(ForeignKey("workloads.key"))
    state: Mapped[str]
    """`queued`, `running`, or one of `searches.ENDINGS`."""
    started_at: Mapped[str]
    """When it was asked for; ISO 8601 in UTC, as are all times here."""
    ended_at: Mapped[str | None]
    request: Mapped[Body]
    result: Mapped[Body | None] = mapped_column(JSON(none_as_null=True))
    digest: Mapped[str | None]
    """Of what was asked; unique among queued and running searches."""
    campaign_id: Mapped[str | None]
    """Shared by searches that were asked for together."""
    hardware_name: Mapped[str | None]
    """What a runner must have to drive it; None for a search of the command line that nobody else has asked for."""
    lease_owner: Mapped[str | None]
    lease_epoch: Mapped[int] = mapped_column(server_default="0")
    """Raised whenever the lease changes hands: no earlier driver can write any more."""
    lease_expires_at: Mapped[float | None]
    """Seconds since 1970 by the database's clock."""
    spent_seconds: Mapped[float] = mapped_column(server_default="0")
    """This and the next: what all its drivers have spent of its budget."""
    spent_trials: Mapped[int] = mapped_column(server_default="0")
    last_seq: Mapped[int] = mapped_column(server_default="0")
    """The number of its last event."""


class EventRow(Base):
    """What happened in a search, numbered from 1 without a gap."""

    __tablename__ = "events"

    search_id: Mapped[str] = mapped_column(ForeignKey("searches.search_id"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    at: Mapped[str]
    body: Mapped[Body]


OF_CONTEXT = ("hardware_key", "stack_key", "workload_key")
"""The columns that say which context a trial is of."""
OF_CONFIG = (*OF_CONTEXT, "config_key")
OF_IDENTITY = (*OF_CONFIG, "memory_limit_bytes")
"""Trials that have these in common are attempts of one."""


class TrialRow(Base):
    """A `Trial`. Rows are never deleted, and what was measured is never changed: only `device_state` and `suspect` are
    written again, where a trial is set aside (`attempts.set_aside`)."""

    __tablename__ = "trials"
    __table_args__ = (
        UniqueConstraint(*OF_IDENTITY, "attempt", name="uq_trials_attempt"),
        Index("ix_trials_hardware", "hardware_key", "id"),
        # The latest of a context, and all that says which of its trials may be on a frontier (ranking.py).
        Index(
            "ix_trials_context",
            *("workload_key", "hardware_key", "stack_key", "id", "config_key"),
            *("outcome", "stopped_early", "family", "device_bytes", "tokens_per_second", "memory_limit_bytes"),
        ),
    )

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    uid: Mapped[str | None] = mapped_column(index=True, unique=True)
    """Given before the write, which may be tried again; None for a trial that was imported, or is older than this."""
    hardware_digest: Mapped[str] = mapped_column(ForeignKey("hardware.digest"))
    hardware_key: Mapped[str]
    stack_key: Mapped[str] = mapped_column(ForeignKey("stacks.key"))
    workload_key: Mapped[str] = mapped_column(ForeignKey("workloads.key"))
    config_key: Mapped[str]
    memory_limit_bytes: Mapped[int] = mapped_column(BigInteger)
    attempt: Mapped[int]
    """1 for the first trial of this identity, then 2, 3, ..."""
    search_id: Mapped[str | None] = mapped_column(ForeignKey("searches.search_id"), index=True)
    family: Mapped[str]
    """`techniques.family` of the config: frontiers are found per family, and filtered by what a user allows."""
    outcome: Mapped[str]
    """The outcome's kind."""
    stopped_early: Mapped[bool] = mapped_column(server_default=false())
    """Whether timing stopped because another config beat this one; its speed counts only if there is no full timing."""
    device_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """This and the next are the measurement's; None if the outcome has none."""
    tokens_per_second: Mapped[float | None]
    seconds: Mapped[float]
    recorded_at: Mapped[str]
    config: Mapped[Body]
    evidence: Mapped[Body]
    """The outcome as JSON."""
    prediction: Mapped[Body | None] = mapped_column(JSON(none_as_null=True))
    """`Prediction.to_json` of what was predicted; None if nothing was."""
    device_state: Mapped[Body | None] = mapped_column(JSON(none_as_null=True))
    """`DeviceState.to_json`; None where the device was not observed."""
    suspect: Mapped[bool] = mapped_column(server_default=false())
    """Whether the trial's time cannot be trusted (`Trial.doubts`); it counts only if there is no clean one."""
    node: Mapped[str | None]
    """The machine that it ran on; None for trials of before it was recorded, and for those that were imported. This and
    the columns after `driver` are for whoever asks the store by SQL."""
    driver: Mapped[str | None]
    """`Stack.driver`."""
    autofit_version: Mapped[str | None]
    """This and the next are None for trials of before they were recorded, and for those that were imported."""
    search_epoch: Mapped[int | None]
    """The epoch of the lease under which it was stored; None also without a search."""


class ContextRow(Base):
    """A hardware, stack and workload with trials: what shares a frontier."""

    __tablename__ = "contexts"

    hardware_key: Mapped[str] = mapped_column(primary_key=True)
    stack_key: Mapped[str] = mapped_column(primary_key=True)
    workload_key: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(BigInteger)
    """Raised in each transaction that stores a trial of it. Equal versions have the same trials; how far speeds within
    noise count as ties is learnt from all workloads of the hardware, and may move meanwhile."""
    last_trial_id: Mapped[int] = mapped_column(BigInteger)
    """Its newest trial."""
    set_asides: Mapped[int] = mapped_column(server_default="0")
    """How often one of its trials was set aside: while this stays, so does what was read of earlier ones."""


class TokenRow(Base):
    """Who may ask over HTTP. The token itself is not kept."""

    __tablename__ = "tokens"
    __table_args__ = (Index("uq_tokens_digest", "digest", unique=True),)

    name: Mapped[str] = mapped_column(primary_key=True)
    """Never given to another, so that what was done under it stays its own."""
    scope: Mapped[str]
    """One of `access.SCOPES`."""
    digest: Mapped[str]
    """SHA-256 of the token, which is random and long: nothing slower is needed against guessing."""
    created_at: Mapped[str]
    revoked_at: Mapped[str | None]


class AuditRow(Base):
    """What someone has started or ended over HTTP, or was refused to end."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    at: Mapped[str]
    token: Mapped[str]
    """The token's name, or `access.OPERATOR`."""
    action: Mapped[str]
    """`search`, `cancel` or `refused`."""
    search_id: Mapped[str] = mapped_column(ForeignKey("searches.search_id"), index=True)


class KeyRow(Base):
    """An idempotency key, by which a client may ask again without starting a second search."""

    __tablename__ = "idempotency_keys"

    token: Mapped[str] = mapped_column(primary_key=True)
    """The name of the token that gave it; empty without a token."""
    key: Mapped[str] = mapped_column(primary_key=True)
    digest: Mapped[str]
    """Of what was asked with it."""
    search_id: Mapped[str] = mapped_column(ForeignKey("searches.search_id"))


class EstimateRow(Base):
    """A cached estimate; this table may be emptied at any time."""

    __tablename__ = "estimates"

    key: Mapped[str] = mapped_column(primary_key=True)
    """Digest of everything that the estimate depends on, including the estimator's own version."""
    estimate: Mapped[Body]
    recorded_at: Mapped[str]


class ProbeRow(Base):
    """The newest `Probe` of a device under a stack, for models of the same shapes; or the newest link between machines
    that have the device, for ranks spread in the same way."""

    __tablename__ = "probes"

    hardware_key: Mapped[str] = mapped_column(primary_key=True)
    stack_key: Mapped[str] = mapped_column(primary_key=True)
    shapes_key: Mapped[str] = mapped_column(primary_key=True)
    """`device_probe.shapes_key`, which covers the probe's version: of a model's digest, or of a link's name."""
    body: Mapped[Body]
    """`Probe.to_json`, or a link's `ProbePart.to_json`."""
    recorded_at: Mapped[str]


def table_of(model: type[Base]) -> Table:
    """The table itself: statements of it run faster than those of its model."""
    return Base.metadata.tables[model.__tablename__]


TABLES = tuple(table.name for table in Base.metadata.sorted_tables)
"""The names of the tables, each after those it refers to."""
