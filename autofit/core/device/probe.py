"""What short measurements of a device have shown: its rates by kind of work, and a few layers' real step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.state import DeviceState
from autofit.core.document import Document, read
from autofit.core.prediction import StepWork
from autofit.core.workload import digest

PROBE_VERSION = 6
"""Incremented whenever a probe measures other things or in another way: probes stored before are then not used."""

OUT_OF_TIME = "no time was left for it"
CUT_SHORT = re.compile(
    "out of memory|can't allocate|cannot allocate|failed to allocate|not enough memory|bad_alloc|MemoryError"
    rf"|could not create a memory object|ALLOC_FAILED|{OUT_OF_TIME}",
    re.IGNORECASE,
)
"""How errors of torch, of the libraries below it, and our own say that a part could not be finished."""

WAYS = ("to the device", "to the host")


def transfer(way: str) -> str:
    """The figure of copies one of the `WAYS`, from or into pinned memory."""
    return f"transfers {way}, pinned, bytes per second"


CONTEXT = "context and kernels of libraries, bytes"
"""The figure of what a process takes of a CUDA device outside torch's allocator, after every other part."""
BETWEEN_RANKS = "between ranks"
"""The part that only trials of several devices need, for ranks that share a machine: one, whatever their number."""
COLLECTIVES = ("reduction", "gather")


def products_in(number_format: str) -> str:
    """The part that measures products of matrices in a number format."""
    return f"products in {number_format}"


def memory_bound_in(number_format: str) -> str:
    """The part that measures what takes as long as its bytes do."""
    return f"memory-bound operations in {number_format}"


def between(hardware: Hardware, ranks: int) -> str:
    """The part that measures what goes between so many ranks: `BETWEEN_RANKS` where they share a machine; else one for
    each way to spread them, told by the most ranks on one machine, for these share its network."""
    spread = f"between {ranks} ranks, at most {hardware.count} on a machine"
    return spread if hardware.spans_machines(ranks) else BETWEEN_RANKS


def collective(name: str, part: str = BETWEEN_RANKS) -> str:
    """The figure of one of the `COLLECTIVES`, in a part that `between` names: what each rank sends to others."""
    return f"{name} {part}, bytes per second"


def link_rate(figures: Mapping[str, float], part: str = BETWEEN_RANKS) -> float | None:
    """Bytes per second that each rank sends to others in the slower of the `COLLECTIVES`; None if neither is known."""
    return min((rate for name in COLLECTIVES if (rate := figures.get(collective(name, part)))), default=None)


UPDATE_ON_HOST = "update on the host, bytes per second"
"""The figure of an optimizer that runs there: what it reads and writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePart(Document):
    """One part of a probe: what it has measured, or why it has not."""

    name: str
    seconds: float
    """How long it took."""
    seconds_per: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Seconds per unit of work, by kind (`work_kinds.KINDS`)."""
    figures: Mapping[str, float] = field(default_factory=dict, hash=False)
    """What is measured but is no rate of a kind of work, by name; each name ends with its unit."""
    failure: str | None = None
    """Why it ended early, in one sentence; what it had measured until then still counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep(Document):
    """The real micro-step of the model cut to a few decoder layers."""

    config: Mapping[str, Any] = field(hash=False)
    layers: int
    seconds: float
    work: StepWork | None
    """Of that micro-step; None if it could not be traced, or was counted by another version of the estimator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Document):
    """All of it. Used only on the same hardware and stack, for models of the same shapes."""

    hardware: Hardware
    stack: Stack
    model: str
    """Whose shapes were measured."""
    shapes_key: str
    """`shapes_key` of that model."""
    parts: tuple[ProbePart, ...]
    steps: tuple[MeasuredStep, ...]
    seconds: float
    """How long the probe took, its process's start included."""
    recorded_at: str
    """When it ended, ISO 8601 in UTC."""
    device_state: DeviceState | None = None
    """What else went on with the device meanwhile; None where it was not observed."""
    version: int = PROBE_VERSION
    """The `PROBE_VERSION` that it was made by."""

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why its rates cannot be trusted, each reason in a few words; empty if they can."""
        return () if self.device_state is None else self.device_state.doubts(self.hardware)

    @property
    def cut_short(self) -> tuple[str, ...]:
        """The names of the parts that ran out of memory or time, which the device may have now."""
        return tuple(part.name for part in self.parts if part.failure and CUT_SHORT.search(part.failure))

    def completed_by(self, later: Probe) -> Probe:
        """This probe with the parts of `later` added; those of the same names replace its own."""
        earlier = {part.name: part for part in self.parts}
        # What was cut short now is still known from before.
        lost = {name for name in later.cut_short if name in earlier}
        every = earlier | {part.name: part for part in later.parts if part.name not in lost}
        return replace(
            self,
            parts=tuple(every.values()),
            steps=later.steps or self.steps,
            recorded_at=later.recorded_at,
            device_state=later.device_state or self.device_state,
        )

    @property
    def seconds_per(self) -> dict[str, float]:
        """Seconds per unit of work, by kind; without the kinds whose part failed."""
        return {kind: rate for part in self.parts for kind, rate in part.seconds_per.items()}

    @property
    def figures(self) -> dict[str, float]:
        return {name: value for part in self.parts for name, value in part.figures.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Probe:
        """The inverse of `to_json`; probes were kept before they had versions."""
        return read(cls, {"version": 0, **data})


def shapes_key(model_digest: str) -> str:
    return digest([PROBE_VERSION, model_digest])
