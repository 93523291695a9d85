"""The memory of one training step as data: when each storage is allocated and freed, and in which part of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from autofit.estimate.time.op_costs import Work


class Category(IntEnum):
    """What a storage holds; the order is that of the breakdown."""

    WEIGHTS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    ACTIVATIONS = 3
    LOGITS_AND_LOSS = 4
    TEMPORARIES = 5


class Place(NamedTuple):
    """Where in a step something happens."""

    stage: str
    """`forward-1`, `backward-1`, `forward-2`, `backward-2` of the micro-steps; `optimizer-1` and `-2` of the updates
    and of what precedes them after the micro-step of that number."""
    layer: int
    """Index of the decoder layer; BEFORE and AFTER for what precedes the first and follows the last, LOSS for the
    output head with the loss."""

    @property
    def phase(self) -> str:
        """`forward`, `backward` or `optimizer`."""
        return self.stage.partition("-")[0]


BEFORE, AFTER, LOSS = -1, 1 << 20, 1 << 21
SETUP = "setup"
"""The stage before the first step, in which a library works on existing weights."""
EMPTIED = -1
"""In place of a stream: where a storage without bytes is allocated, a library gives unused memory back to the driver
(`torch.cuda.empty_cache`)."""
OUTSIDE = (BEFORE, AFTER, LOSS)
"""Places that are not at a layer."""


@dataclass(slots=True)
class Storage:
    """One block of memory over its lifetime."""

    bytes: int
    """Size at the micro-batch and rank of the trace."""
    allocated: Place | None
    """None for what exists before the step: weights and buffers."""
    freed: Place | None = None
    """None for what outlives the trace."""
    layer: int | None = None
    """The decoder layer that a weight belongs to; None outside the layers, and for what is allocated in the step."""
    recomputed: bool = False
    """Whether a checkpoint's recomputation allocated it."""
    trained: bool | None = None
    """Whether a parameter is trained; None for everything but parameters."""
    item_bytes: int = 1
    """Bytes of a parameter's element."""
    stacked: bool = False
    """Whether a parameter has the weights of several experts, each of which is used as a slice of it."""
    shares: int = 1
    """Number of ranks that it is divided among: each holds an equal share."""
    holds: Category | None = None
    """What it holds; None where that follows from its lifetime."""
    stream: int = 0
    """Stream of the device on which it is allocated: the allocator keeps each stream's blocks apart. Or EMPTIED."""
    of_hook: bool = False
    """Whether it has no bytes, and is there for a moment where autograd is done with a gradient and runs its hooks."""
    of_product: bool = False
    """Whether it is the result of a matrix product."""
    summed_columns: int = 0
    """How many columns a kernel adds up in it; if any, `bytes` is the number of values (`column_sums`)."""
    summed_rows: int = 0
    """Into how many rows, one for each entry of a vocabulary; 0 where all become one."""


class Event(NamedTuple):
    """A storage is allocated or freed."""

    storage: int
    allocates: bool


@dataclass(slots=True)
class MemoryTrace:
    """Storages and their events, grouped by place, in the order in which the places were visited."""

    storages: list[Storage] = field(default_factory=list)
    segments: list[tuple[Place, list[Event]]] = field(default_factory=list)
    work: dict[Place, list[Work]] = field(default_factory=dict)
    """What the operations of each place cost."""
    labels: dict[tuple[str, str], int] = field(default_factory=dict)
    """Storages that two traces have in common, by (stage, label)."""
    flash_layers: int = 0
    """Number of layers whose attention ran in torch's flash kernel in the first forward, without dropout."""
    outside_allocator: dict[Place, list[int]] = field(default_factory=dict)
    """Bytes of each allocation outside the device's allocator, in pinned or managed memory, by place."""

    def events(self) -> list[tuple[Place, Event]]:
        return [(place, event) for place, events in self.segments for event in events]
