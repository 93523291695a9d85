"""Tapes as arrays: the decoder's with the loss put in where it belongs, and the optimizer's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autofit.estimate.amounts import Amounts
from autofit.estimate.seam import HIDDEN
from autofit.estimate.tape import LOSS, Category, Event, Place, Storage, Tape

Integers = NDArray[np.int64]
PHASES = ("forward", "backward", "optimizer")
STAGES = ("forward-1", "backward-1", "forward-2", "backward-2")


@dataclass(frozen=True, slots=True)
class Events:
    """Parallel arrays, one entry per event, in order."""

    storages: Integers
    """Which storage."""
    signs: Integers
    """1 where it is allocated, -1 where it is freed."""
    phases: Integers
    """Index in PHASES."""

    @classmethod
    def of(cls, found: Sequence[tuple[Place, int, bool]]) -> Events:
        """From (place, storage, whether it is allocated)."""
        return cls(
            np.array([storage for _, storage, _ in found], dtype=np.int64),
            np.array([1 if allocates else -1 for _, _, allocates in found], dtype=np.int64),
            np.array([PHASES.index(place.phase) for place, _, _ in found], dtype=np.int64),
        )

    @classmethod
    def joined(cls, parts: Iterable[Events]) -> Events:
        """One after the other."""
        every = list(parts)
        return cls(
            np.concatenate([p.storages for p in every]),
            np.concatenate([p.signs for p in every]),
            np.concatenate([p.phases for p in every]),
        )

    def __getitem__(self, part: slice) -> Events:
        return Events(self.storages[part], self.signs[part], self.phases[part])

    def __len__(self) -> int:
        return len(self.storages)


@dataclass(frozen=True, slots=True)
class MicroSteps:
    """Memory of two micro-steps: storages as functions of micro-batch and rank, and their events."""

    sizes: Amounts
    categories: NDArray[np.int8]
    residents: Integers
    """The storages that are there before the step."""
    first: Events
    second: Events


@dataclass(frozen=True, slots=True)
class Updates:
    """Memory of the first update, which creates the states, and of a later one."""

    sizes: NDArray[np.int64]
    categories: NDArray[np.int8]
    first: Events
    second: Events


def micro_steps(decoder: Tape, loss: Tape) -> MicroSteps:
    """The decoder's tape, spliced to its full depth, with the events of the loss's."""
    return _Join(decoder, loss).run()


def updates(tape: Tape) -> Updates:
    """The optimizer's tape as arrays."""
    created = {event.storage for _, event in tape.events() if event.allocates}
    stages = {
        stage: Events.of(
            [
                (place, event.storage, event.allocates)
                for place, event in tape.events()
                if place.stage == stage and event.storage in created
            ]
        )
        for stage in ("optimizer-1", "optimizer-2")
    }
    return Updates(
        np.array([s.bytes for s in tape.storages], dtype=np.int64),
        np.array([update_category(s) for s in tape.storages], dtype=np.int8),
        stages["optimizer-1"],
        stages["optimizer-2"],
    )


class _Join:
    """Storages of the loss are numbered after the decoder's, but for those that both name alike."""

    def __init__(self, decoder: Tape, loss: Tape) -> None:
        self._decoder = decoder
        self._loss = loss
        self._common = {index: decoder.labels[label] for label, index in loss.labels.items() if label in decoder.labels}
        self._labels = {index: name for (_, name), index in decoder.labels.items()}
        self._offset = len(decoder.storages)

    def run(self) -> MicroSteps:
        stages = {stage: self._stage(stage) for stage in STAGES}
        storages = [*self._decoder.storages, *self._loss.storages]
        return MicroSteps(
            sizes=Amounts.joined(
                [
                    Amounts.of(s.bytes for s in self._decoder.storages),
                    Amounts.constant(s.bytes for s in self._loss.storages),
                ]
            ),
            categories=np.array([self._category(i, s) for i, s in enumerate(storages)], dtype=np.int8),
            residents=np.array(
                [i for i, s in enumerate(self._decoder.storages) if s.allocated is None], dtype=np.int64
            ),
            first=Events.of(stages["forward-1"] + stages["backward-1"]),
            second=Events.of(stages["forward-2"] + stages["backward-2"]),
        )

    def _category(self, index: int, storage: Storage) -> Category:
        return Category.ACTIVATIONS if self._labels.get(index) == HIDDEN else micro_step_category(storage)

    def _stage(self, stage: str) -> list[tuple[Place, int, bool]]:
        """The events of one stage, those of the loss before what else the decoder does there."""
        found: list[tuple[Place, int, bool]] = []
        put_in = False
        for place, events in self._decoder.segments:
            if place.stage != stage:
                continue
            if place.layer == LOSS and not put_in:
                found += self._of_loss(stage)
                put_in = True
            found += [(place, e.storage, e.allocates) for e in events if self._stays(place, e)]
        return found

    def _of_loss(self, stage: str) -> list[tuple[Place, int, bool]]:
        return [
            (place, self._common.get(event.storage, self._offset + event.storage), event.allocates)
            for place, events in self._loss.segments
            if place.stage == stage and place.layer == LOSS
            for event in events
            if event.allocates or self._loss_frees(event.storage)
        ]

    def _loss_frees(self, storage: int) -> bool:
        """Whether the loss frees it: not the gradients that it hands on, nor hidden states that the decoder keeps."""
        common = self._common.get(storage)
        if common is None:
            return self._loss.storages[storage].freed is not None
        if self._labels[common] != HIDDEN:
            return False
        freed = self._decoder.storages[common].freed
        return freed is not None and freed.layer == LOSS

    def _stays(self, place: Place, event: Event) -> bool:
        """Whether an event is the decoder's own: not of what the seam allocates, nor what the loss does to the common.

        At the seam the decoder's own are what autocast drops and the ends of gradients.
        """
        label = self._labels.get(event.storage)
        if label is None:
            allocated = self._decoder.storages[event.storage].allocated
            return allocated is None or allocated.layer != LOSS
        return place.layer != LOSS or (label != HIDDEN and not event.allocates)


def micro_step_category(storage: Storage) -> Category:
    """What a storage of a forward or backward holds, told by when it comes and goes."""
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
    """What a storage of an update holds: a state is there after it, if only until the next one replaces it."""
    lasts = storage.freed is None or storage.allocated is None or storage.freed.stage != storage.allocated.stage
    return Category.OPTIMIZER if lasts else Category.TEMPORARIES
