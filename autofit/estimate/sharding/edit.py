"""A decoder's trace, to be rewritten into that of one rank of several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autofit.core.lattice import Config
from autofit.estimate.memory.memory_trace import (
    AFTER,
    BEFORE,
    EMPTIED,
    LOSS,
    OUTSIDE,
    Category,
    Event,
    MemoryTrace,
    Place,
    Storage,
)
from autofit.estimate.memory.symbolic_sizes import RANK

ROOT = None
"""The unit outside the decoder layers: embeddings, final norm, head."""
Unit = int | None
"""A decoder layer's index, or ROOT."""
PlacedEvents = list[Event]


class Edit:
    """A copy of a trace's events, with the places where a sharding library acts: bounds of layers and stages."""

    def __init__(self, trace: MemoryTrace) -> None:
        self.trace = MemoryTrace(
            storages=[replace(storage) for storage in trace.storages],
            segments=[(place, list(events)) for place, events in trace.segments],
            labels=dict(trace.labels),
        )
        layers = [s.layer for s in trace.storages if s.layer is not None]
        self.layers = range(max(layers, default=-1) + 1)

    def parameters(self, unit: Unit, *, trained: bool | None = None) -> list[Storage]:
        """The parameters of a unit; with `trained`, only the trained ones or only the frozen ones."""
        return [
            s
            for s in self.trace.storages
            if s.trained is not None and s.layer == unit and trained in (None, s.trained) and s.allocated is None
        ]

    def trained(self) -> list[Storage]:
        """The trained parameters, in the order of the model."""
        return [p for p in loaded_in_order(self.trace) if p.trained]

    def trained_sizes(self) -> list[int]:
        """Bytes of each trained parameter."""
        return [p.bytes for p in self.trained()]

    def allocate(
        self,
        bytes_: Iterable[int],
        place: Place | None,
        *,
        shares: int = 1,
        holds: Category = Category.TEMPORARIES,
        stream: int = 0,
        events: PlacedEvents | None = None,
    ) -> Sequence[int]:
        """A buffer that holds these bytes (at the adapter rank of the trace), as two storages: the part proportional to
        that rank, and the remainder. It is allocated at the end of `events`, if these are given."""
        sizes = list(bytes_)
        parts = (sum(s for s in sizes if s % RANK), sum(s for s in sizes if s % RANK == 0))
        indices = []
        for part in filter(None, parts):
            self.trace.storages.append(Storage(part, place, shares=shares, holds=holds, stream=stream))
            indices.append(len(self.trace.storages) - 1)
        if events is not None:
            events += [Event(index, True) for index in indices]
        return indices

    def empty_cache(self, place: Place, events: PlacedEvents) -> None:
        """Give unused memory back to the driver at the end of `events`."""
        self.trace.storages.append(Storage(0, place, stream=EMPTIED, holds=Category.TEMPORARIES))
        events.append(Event(len(self.trace.storages) - 1, True))

    def at_start(self, place: Place) -> PlacedEvents:
        """A list for events that precede all others of a layer's place."""
        return self._inserted(place, 0)

    def at_end(self, place: Place) -> PlacedEvents:
        """A list for events that follow all others of a layer's place."""
        events = next((e for p, e in reversed(self.trace.segments) if p == place), None)
        return self._inserted(place, 1) if events is None else events

    def before_stage(self, stage: str) -> PlacedEvents:
        """A list for events that precede all others of a stage, including those of the loss."""
        first = next(i for i, (place, _) in enumerate(self.trace.segments) if place.stage == stage)
        events: PlacedEvents = []
        self.trace.segments.insert(first, (Place(stage, AFTER), events))
        return events

    def after_stage(self, stage: str) -> PlacedEvents:
        """A list for events that follow all others of a stage."""
        last = max(i for i, (place, _) in enumerate(self.trace.segments) if place.stage == stage)
        return self.trace.segments[last][1]

    def before_update(self, backward: str) -> tuple[Place, PlacedEvents]:
        """A place for what follows the last backward and precedes the update, with its list for events."""
        self.trace.segments.append((Place("optimizer" + backward[-2:], AFTER), []))
        return self.trace.segments[-1]

    def gradients(self, stage: str) -> dict[Unit, list[int]]:
        """The parameters' gradients that a backward leaves behind, by the unit that they belong to."""
        gradients: dict[Unit, list[int]] = {unit: [] for unit in (ROOT, *self.layers)}
        for index, storage in enumerate(self.trace.storages):
            if storage.allocated is not None and storage.allocated.stage == stage and storage.freed is None:
                layer = storage.allocated.layer
                gradients[ROOT if layer in OUTSIDE else layer].append(index)
        return gradients

    def all_gradients(self, stage: str) -> set[int]:
        """The same of all units together."""
        return {index for indices in self.gradients(stage).values() for index in indices}

    def is_embeddings(self, gradient: int) -> bool:
        """Whether a gradient outside the layers is that of an input embedding, which comes last."""
        home = self.trace.storages[gradient].allocated
        return home is not None and (home.layer == BEFORE or (home.layer == LOSS and self.is_tied(gradient)))

    def is_tied(self, gradient: int) -> bool:
        """Whether the gradient of a head is also that of the input embedding: else two parameters have its size."""
        of_root = [p.bytes for p in self.parameters(ROOT, trained=True)]
        return of_root.count(self.trace.storages[gradient].bytes) == 1

    def free(self, events: PlacedEvents, storages: Iterable[int]) -> None:
        events += [Event(index, False) for index in storages]

    def _inserted(self, place: Place, after: int) -> PlacedEvents:
        positions = [i for i, (segment_place, _) in enumerate(self.trace.segments) if segment_place == place]
        events: PlacedEvents = []
        self.trace.segments.insert((positions[-1] if after else positions[0]) + after, (place, events))
        return events


def loaded_in_order(trace: MemoryTrace) -> list[Storage]:
    """Every parameter, buffer and scale of the model in its order: what precedes the layers, the layers, what follows
    them."""
    loaded = [s for s in trace.storages if s.allocated is None and s.holds is None]
    first = next((i for i, s in enumerate(loaded) if s.layer is not None), len(loaded))
    layers = sorted((s for s in loaded if s.layer is not None), key=lambda s: s.layer or 0)
    return [*loaded[:first], *layers, *(s for s in loaded[first:] if s.layer is None)]


def alike(trace: MemoryTrace) -> MemoryTrace:
    """`trace` with a second micro-step like the first, in which there are no gradients to add to, as where a library
    takes every micro-batch's gradients away."""
    edit = Edit(trace)
    doubled = edit.trace
    copies = {
        index: len(trace.storages) + count
        for count, index in enumerate(
            i for i, s in enumerate(trace.storages) if s.allocated is not None and s.allocated.stage.endswith("-1")
        )
    }
    doubled.storages += [_in_second(trace.storages[index]) for index in copies]
    first = [(place, events) for place, events in trace.segments if place.stage.endswith("-1")]
    doubled.segments = [(place, list(events)) for place, events in first]
    ends_early = {event.storage for _, events in first for event in events if not event.allocates}
    for index in copies:
        if index not in ends_early:
            doubled.storages[index].freed = None
    doubled.segments += [
        (_second(place), [Event(copies[e.storage], e.allocates) for e in events if e.storage in copies])
        for place, events in first
    ]
    doubled.labels = {(stage, name): index for (stage, name), index in trace.labels.items() if stage.endswith("-1")}
    doubled.labels |= {(stage[:-1] + "2", name): copies[index] for (stage, name), index in doubled.labels.items()}
    return doubled


def _second(place: Place) -> Place:
    return Place(place.stage[:-1] + "2", place.layer)


def _in_second(storage: Storage) -> Storage:
    freed = storage.freed if storage.freed is not None and storage.freed.stage.endswith("-1") else None
    assert storage.allocated is not None
    return replace(storage, allocated=_second(storage.allocated), freed=None if freed is None else _second(freed))


def plain(config: Config) -> Config:
    """`config` on one device, with everything on it."""
    return config.replace(sharding="none", offload="none")
