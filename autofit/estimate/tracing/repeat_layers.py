"""From the trace of a small stack of layers to that of the full one, by repeating layers."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from autofit.estimate.memory.memory_trace import BEFORE, OUTSIDE, Event, MemoryTrace, Place, Storage


class NotUniform(Exception):
    """Layers of one kind do not allocate alike: the full stack must be traced."""


def repeat_layers(small: MemoryTrace, representative: tuple[int, ...]) -> MemoryTrace:
    """The trace of `len(representative)` layers, the i-th of which behaves like layer `representative[i]` of `small`.

    A layer's own storages get a copy for every layer that it stands for. A neighbour's storage that it frees is found
    by its order of allocation; raises `NotUniform` if sizes there disagree.
    """
    return _Repetition(small, representative).run()


class _Repetition:
    def __init__(self, small: MemoryTrace, representative: tuple[int, ...]) -> None:
        self._small = small
        self._representative = representative
        self._images: dict[int, list[int]] = defaultdict(list)
        for layer, stand_in in enumerate(representative):
            self._images[stand_in].append(layer)
        self._ranks, self._order = _ranks(small)
        self._full = MemoryTrace()
        self._copies: dict[tuple[int, int], int] = {}
        """(storage of the small trace, layer of the full stack) to the storage of the full trace."""

    def run(self) -> MemoryTrace:
        self._copy_residents()
        for stage, segments in itertools.groupby(self._small.segments, key=lambda segment: segment[0].stage):
            self._repeat(stage, segments)
        self._full.labels = {label: self._copies[index, BEFORE] for label, index in self._small.labels.items()}
        return self._full

    def _copy_residents(self) -> None:
        """In the order in which a model is built: what precedes the layers, layer after layer, what follows them."""
        residents = [(i, storage.layer) for i, storage in enumerate(self._small.storages) if storage.allocated is None]
        first = next((index for index, layer in residents if layer is not None), len(self._small.storages))
        outside = [index for index, layer in residents if layer is None]
        order = [(index, BEFORE) for index in outside if index < first]
        for layer, stand_in in enumerate(self._representative):
            order += [(index, layer) for index, home in residents if home == stand_in]
        order += [(index, BEFORE) for index in outside if index > first]
        for index, layer in order:
            storage = self._small.storages[index]
            home = None if storage.layer is None else layer
            self._copies[index, layer] = self._add(storage, None, storage.freed, home)

    def _repeat(self, stage: str, segments: Iterable[tuple[Place, list[Event]]]) -> None:
        """Write one stage: what surrounds the layers once, and every layer of the full stack like its stand-in."""
        by_layer: dict[int, list[Event]] = defaultdict(list)
        before: list[tuple[Place, list[Event]]] = []
        after: list[tuple[Place, list[Event]]] = []
        for place, events in segments:
            if place.layer not in OUTSIDE:
                by_layer[place.layer] += events
            else:
                (after if by_layer else before).append((place, events))
        for place, events in before:
            self._write(place, events, None)
        layers = range(len(self._representative))
        for layer in reversed(layers) if stage.startswith("backward") else layers:
            self._write(Place(stage, layer), by_layer[self._representative[layer]], layer)
        for place, events in after:
            self._write(place, events, None)

    def _write(self, place: Place, events: list[Event], layer: int | None) -> None:
        written: list[Event] = []
        for dropped, together in itertools.groupby(events, lambda event: layer is None and self._is_layers(event)):
            copies = [copy for event in together for copy in self._written(event, place, layer)]
            # What the layers allocated and autocast drops for all at once goes in the order of allocation, as recorded.
            written += sorted(copies) if dropped else copies
        self._full.segments.append((place, written))

    def _is_layers(self, event: Event) -> bool:
        """Whether an event frees what a layer has allocated."""
        return not event.allocates and _home(self._small.storages[event.storage]) is not None

    def _written(self, event: Event, place: Place, layer: int | None) -> Iterator[Event]:
        """The events of the full stack that stand for one of the small one."""
        storage = self._small.storages[event.storage]
        if event.allocates:
            copy = self._add(storage, place, None, storage.layer)
            self._copies[event.storage, BEFORE if layer is None else layer] = copy
            yield Event(copy, True)
            return
        for copy in self._freed(event.storage, storage, place.stage, layer):
            if self._full.storages[copy].freed is not None:
                raise NotUniform(f"{place} frees what was freed before")
            self._full.storages[copy].freed = place
            yield Event(copy, False)

    def _freed(self, index: int, storage: Storage, stage: str, layer: int | None) -> list[int]:
        """The copies that an event frees: one, or for an event outside the layers those of all layers."""
        home = _home(storage)
        if home is None:
            # What layers share is freed by the last of them to run, whichever stood for it.
            if layer is not None:
                alike = self._images[self._representative[layer]]
                if layer != (alike[0] if stage.startswith("backward") else alike[-1]):
                    return []
            return [self._copies[index, BEFORE]]
        images = self._images[home]
        if layer is None:
            return [self._copies[index, image] for image in images]
        distance = home - self._representative[layer]
        if abs(distance) > 1:
            if len(images) != 1:
                raise NotUniform(f"layer {layer} frees what a layer {distance} away has allocated")
            return [self._copies[index, images[0]]]
        neighbour = layer + distance
        return [self._copies[self._corresponding(index, neighbour), neighbour]]

    def _corresponding(self, index: int, layer: int) -> int:
        """The storage that the stand-in of `layer` allocates where another layer of its kind allocates `index`."""
        place, rank = self._ranks[index]
        stand_in = Place(place.stage, self._representative[layer])
        candidates = self._order[stand_in]
        if rank >= len(candidates) or self._small.storages[candidates[rank]].bytes != self._small.storages[index].bytes:
            raise NotUniform(f"{place} and {stand_in} differ in allocation {rank}")
        return candidates[rank]

    def _add(self, storage: Storage, allocated: Place | None, freed: Place | None, layer: int | None) -> int:
        """Add a copy of `storage` that lives then and belongs there."""
        self._full.storages.append(replace(storage, allocated=allocated, freed=freed, layer=layer))
        return len(self._full.storages) - 1


def _home(storage: Storage) -> int | None:
    """The decoder layer that has allocated a storage, or whose weight it is; None outside the layers."""
    layer = storage.layer if storage.allocated is None else storage.allocated.layer
    return None if layer in OUTSIDE else layer


def _ranks(trace: MemoryTrace) -> tuple[dict[int, tuple[Place, int]], dict[Place, list[int]]]:
    """For every storage its place and rank there; for every place its storages in the order of allocation."""
    ranks: dict[int, tuple[Place, int]] = {}
    order: dict[Place, list[int]] = defaultdict(list)
    for place, event in trace.events():
        if event.allocates:
            ranks[event.storage] = (place, len(order[place]))
            order[place].append(event.storage)
    return ranks, order
