"""Tapes as arrays: the decoder's, with the loss inserted where it belongs, and the optimizer's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autofit.core.outcome import ALL_PHASES, PHASES
from autofit.estimate.memory.memory_trace import BEFORE, LOSS, SETUP, Category, Event, MemoryTrace, Place, Storage
from autofit.estimate.memory.symbolic_sizes import SymbolicSizes, joined
from autofit.estimate.tracing.loss_boundary import HIDDEN

Integers = NDArray[np.int64]
STAGES = tuple(tuple(f"{phase}-{number}" for phase in PHASES) for number in (1, 2))
"""The stages of each micro-step."""


@dataclass(frozen=True, slots=True)
class Events:
    """Parallel arrays, one entry per event, in order."""

    storages: Integers
    """Which storage."""
    signs: Integers
    """1 where it is allocated, -1 where it is freed."""
    phases: Integers
    """Index in ALL_PHASES."""

    @classmethod
    def of(cls, rows: Sequence[tuple[Place, int, bool]]) -> Events:
        """From (place, storage, whether it is allocated)."""
        return cls(
            np.array([storage for _, storage, _ in rows], dtype=np.int64),
            np.array([1 if allocates else -1 for _, _, allocates in rows], dtype=np.int64),
            np.array([ALL_PHASES.index(place.phase) for place, _, _ in rows], dtype=np.int64),
        )


@dataclass(frozen=True, slots=True)
class Storages:
    """Parallel arrays, one entry per storage."""

    sizes: SymbolicSizes
    """Bytes; of a storage in which a kernel adds columns up, how many values."""
    categories: NDArray[np.int8]
    streams: NDArray[np.int8]
    """Stream of the device on which each is allocated."""
    of_products: NDArray[np.bool_]
    """Whether each is the result of a matrix product."""
    summed_columns: Integers
    """How many columns a kernel adds up in each."""
    summed_rows: Integers
    """The rows that there are in the end, as `Storage.summed_rows`."""

    @classmethod
    def of(cls, storages: Sequence[Storage], sizes: SymbolicSizes, category: Callable[[Storage], Category]) -> Storages:
        return cls(
            sizes=sizes,
            categories=np.array([category(s) for s in storages], dtype=np.int8),
            streams=np.array([s.stream for s in storages], dtype=np.int8),
            of_products=np.array([s.of_product for s in storages], dtype=np.bool_),
            summed_columns=np.array([s.summed_columns for s in storages], dtype=np.int64),
            summed_rows=np.array([s.summed_rows for s in storages], dtype=np.int64),
        )


@dataclass(frozen=True, slots=True)
class MicroSteps:
    """Memory of two micro-steps; of two whole steps where the backward pass updates."""

    storages: Storages
    setup: Events
    """What precedes the first step, after which the storages exist that it finds."""
    first: Events
    second: Events


@dataclass(frozen=True, slots=True)
class Updates:
    """Memory of the first update, which creates the states, and of a later one."""

    storages: Storages
    first: Events
    second: Events

    @classmethod
    def of(
        cls, trace: MemoryTrace, sizes_of: Callable[[Iterable[int]], SymbolicSizes] = SymbolicSizes.constant
    ) -> Updates:
        """From the optimizer's trace; `sizes_of` says what its sizes depend on."""
        created = {event.storage for _, event in trace.events() if event.allocates}
        rows = [(place, event.storage, event.allocates) for place, event in trace.events() if event.storage in created]
        sizes = sizes_of(-(-s.bytes // s.shares) for s in trace.storages)
        return cls(
            Storages.of(trace.storages, sizes, update_category),
            *(Events.of([event for event in rows if event[0].stage == f"optimizer-{number}"]) for number in (1, 2)),
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Memory of sequences that are evaluated together between training steps: what comes and goes meanwhile."""

    storages: Storages
    events: Events

    @classmethod
    def of(cls, trace: MemoryTrace) -> Evaluation:
        """From its trace; what it leaves behind, which is nothing of size, is left out."""
        passing = {i for i, storage in enumerate(trace.storages) if storage.allocated and storage.freed}
        rows = [(place, event.storage, event.allocates) for place, event in trace.events() if event.storage in passing]
        sizes = SymbolicSizes.of(s.bytes for s in trace.storages)
        return cls(Storages.of(trace.storages, sizes, _evaluated), Events.of(rows))


class DecoderEvents:
    """A decoder's trace as arrays, with a place in each stage where the events of a loss go."""

    def __init__(self, trace: MemoryTrace) -> None:
        self.trace = trace
        self._labels = {index: name for (_, name), index in trace.labels.items()}
        sizes = SymbolicSizes.of(s.bytes for s in trace.storages).over([s.shares for s in trace.storages])
        self._storages = Storages.of(trace.storages, sizes, micro_step_category)
        for index, label in self._labels.items():
            if label == HIDDEN:
                self._storages.categories[index] = Category.ACTIVATIONS
        self._setup = _setup(trace)
        self._stages = {stage: self._around_loss(stage) for stages in STAGES for stage in stages}

    def with_loss(self, loss: MemoryTrace) -> MicroSteps:
        """Both together. Storages of the loss are numbered after the decoder's, except those that both label alike."""
        common = {index: self.trace.labels[name] for name, index in loss.labels.items() if name in self.trace.labels}
        stages = {
            stage: [before, self._of_loss(loss, stage, common), after]
            for stage, (before, after) in self._stages.items()
        }
        first, second = (joined([part for stage in micro_step for part in stages[stage]]) for micro_step in STAGES)
        of_loss = Storages.of(
            loss.storages, SymbolicSizes.constant(s.bytes for s in loss.storages), micro_step_category
        )
        storages = joined([self._storages, of_loss])
        for index, shared in common.items():
            # The decoder's trace is given what the loss makes.
            storages.of_products[shared] |= loss.storages[index].of_product
        return MicroSteps(storages, self._setup, first, second)

    def _around_loss(self, stage: str) -> tuple[Events, Events]:
        """The events of one stage before those of the loss, and after; what else the decoder does there comes after."""
        before: list[tuple[Place, int, bool]] = []
        after: list[tuple[Place, int, bool]] = []
        current = before
        for place, events in self.trace.segments:
            if place.stage == stage:
                current = after if place.layer == LOSS else current
                current += [(place, e.storage, e.allocates) for e in events if self._stays(place, e)]
        return Events.of(before), Events.of(after)

    def _of_loss(self, loss: MemoryTrace, stage: str, common: dict[int, int]) -> Events:
        offset = len(self.trace.storages)
        return Events.of(
            [
                (place, common.get(event.storage, offset + event.storage), event.allocates)
                for place, events in loss.segments
                if place.stage == stage and place.layer == LOSS
                for event in events
                if event.allocates or self._loss_frees(loss.storages[event.storage], common.get(event.storage))
            ]
        )

    def _loss_frees(self, storage: Storage, common: int | None) -> bool:
        """Whether the loss frees it: not the gradients that it passes on, nor hidden states that the decoder keeps."""
        if common is None:
            return storage.freed is not None
        freed = self.trace.storages[common].freed
        return self._labels[common] == HIDDEN and freed is not None and freed.layer == LOSS

    def _stays(self, place: Place, event: Event) -> bool:
        """Whether an event is the decoder's own, and not the boundary's or the loss's on a shared storage. At the
        boundary those are frees, of what autocast drops and of gradients."""
        label, storage = self._labels.get(event.storage), self.trace.storages[event.storage]
        if label is None:  # a hook's moment is only for libraries, which have used it by now
            return not storage.of_hook and (storage.allocated is None or storage.allocated.layer != LOSS)
        return place.layer != LOSS or (label != HIDDEN and not event.allocates)


def _setup(trace: MemoryTrace) -> Events:
    """What a library does before the first step, then the rest of what exists before it."""
    begin = Place(f"{PHASES[0]}-1", BEFORE)
    rows = [(begin, e.storage, e.allocates) for place, events in trace.segments if place.stage == SETUP for e in events]
    allocated = {storage for _, storage, _ in rows}
    rows += [(begin, i, True) for i, s in enumerate(trace.storages) if s.allocated is None and i not in allocated]
    return Events.of(rows)


def micro_step_category(storage: Storage) -> Category:
    """What a storage of a forward or backward holds, inferred from when it comes and goes."""
    if storage.holds is not None:
        return storage.holds
    if storage.allocated is None:
        return Category.WEIGHTS
    if storage.freed is None or storage.freed.stage[-1] != storage.allocated.stage[-1]:
        return Category.GRADIENTS
    if storage.allocated.layer == LOSS:
        return Category.LOGITS_AND_LOSS
    if storage.recomputed or (storage.allocated.phase == "forward" and storage.freed.phase == "backward"):
        return Category.ACTIVATIONS
    return Category.TEMPORARIES


def update_category(storage: Storage) -> Category:
    """What a storage of an update holds: a state outlives the update, if only until the next one replaces it."""
    if storage.holds is not None:
        return storage.holds
    lasts = storage.freed is None or storage.allocated is None or storage.freed.stage != storage.allocated.stage
    return Category.OPTIMIZER if lasts else Category.TEMPORARIES


def _evaluated(storage: Storage) -> Category:
    """What a storage of an evaluation holds."""
    if storage.holds is not None:
        return storage.holds
    at_loss = storage.allocated is not None and storage.allocated.layer == LOSS
    return Category.LOGITS_AND_LOSS if at_loss else Category.ACTIVATIONS
