"""The tables of a store as typed models, in the newest form of what `database/migrations/` builds step by step."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Double, ForeignKey, Index, Integer, MetaData, UniqueConstraint, false
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
    """`Hardware.key`."""
    name: Mapped[str]
    body: Mapped[Body]


class StackRow(Base):
    """A `Stack` value."""

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
    """A search: what it was asked, its status, and what it answered."""

    __tablename__ = "searches"

    search_id: Mapped[str] = mapped_column(primary_key=True)
    hardware_digest: Mapped[str] = mapped_column(ForeignKey("hardware.digest"))
    stack_key: Mapped[str] = mapped_column(ForeignKey("stacks.key"))
    workload_key: Mapped[str] = mapped_column(ForeignKey("workloads.key"))
    status: Mapped[str]
    """`running`, `done`, `interrupted` or `failed`."""
    started_at: Mapped[str]
    """ISO 8601 in UTC, as are all times here."""
    ended_at: Mapped[str | None]
    request: Mapped[Body]
    result: Mapped[Body | None] = mapped_column(JSON(none_as_null=True))


class TrialRow(Base):
    """A `Trial`. Rows are added and never changed or deleted: nothing measured is ever lost."""

    __tablename__ = "trials"
    __table_args__ = (
        UniqueConstraint(
            "hardware_key",
            "stack_key",
            "workload_key",
            "config_key",
            "memory_limit_bytes",
            "attempt",
            name="uq_trials_attempt",
        ),
        Index("ix_trials_hardware", "hardware_key", "id"),
        # In the frontier's own order, so that a query sorts nothing and reads no row (ranking.py).
        Index(
            "ix_trials_frontier",
            "workload_key",
            "hardware_key",
            "stack_key",
            "outcome",
            "stopped_early",
            "family",
            "device_bytes",
            "tokens_per_second",
            "id",
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


class EstimateRow(Base):
    """A cached estimate; this table may be emptied at any time."""

    __tablename__ = "estimates"

    key: Mapped[str] = mapped_column(primary_key=True)
    """Digest of everything that the estimate depends on, including the estimator's own version."""
    estimate: Mapped[Body]
    recorded_at: Mapped[str]


class ProbeRow(Base):
    """The newest `Probe` of a device under a stack, for models of the same shapes."""

    __tablename__ = "probes"

    hardware_key: Mapped[str] = mapped_column(primary_key=True)
    """`Hardware.key`."""
    stack_key: Mapped[str] = mapped_column(primary_key=True)
    """`Stack.key`."""
    shapes_key: Mapped[str] = mapped_column(primary_key=True)
    """`device_probe.shapes_key`, which covers the probe's version."""
    body: Mapped[Body]
    """`Probe.to_json`."""
    recorded_at: Mapped[str]


TABLES = tuple(table.name for table in Base.metadata.sorted_tables)
"""The names of the tables, each after those it refers to."""
