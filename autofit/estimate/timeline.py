"""The memory of two whole optimizer steps, event by event: when the peak is, and what is alive there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autofit.estimate.tape import AFTER, Category, Event, Place, Storage, Tape

CategoryOf = Callable[[Storage], Category]
STEPS = 2
"""The first creates the optimizer's states, the second runs beside them."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Parallel arrays, one entry per event; weights are allocated first."""

    sizes: NDArray[np.int64]
    """Bytes, as the allocator rounds them; negative where a storage is freed."""
    storages: NDArray[np.int64]
    """Which storage; a number of its own for each life."""
    categories: NDArray[np.int8]
    places: tuple[Place, ...]

    @property
    def totals(self) -> NDArray[np.int64]:
        """Bytes in use after each event."""
        return np.cumsum(self.sizes)

    def peak(self) -> int:
        """The most bytes in use."""
        return int(self.totals.max())

    def phase_peaks(self) -> dict[str, int]:
        """The most bytes in use in each phase."""
        totals = self.totals
        phases = np.array([place.phase for place in self.places])
        return {phase: int(totals[phases == phase].max()) for phase in ("forward", "backward", "optimizer")}

    def breakdown(self) -> dict[Category, int]:
        """Bytes of each category at the moment of the peak."""
        until = int(self.totals.argmax()) + 1
        return {c: int(self.sizes[:until][self.categories[:until] == c].sum()) for c in Category}


def timeline(micro_steps: Tape, updates: Tape, rounding: int) -> Timeline:
    """Two optimizer steps: the micro-steps, then the update, which frees the gradients, twice.

    Every size is rounded up to a multiple of `rounding` bytes, as the device's allocator does.
    """
    return _Writer(micro_steps, updates, rounding).write()


class _Writer:
    def __init__(self, micro_steps: Tape, updates: Tape, rounding: int) -> None:
        self._rounding = rounding
        self._micro_steps = micro_steps
        self._updates = updates
        self._sizes: list[int] = []
        self._storages: list[int] = []
        self._categories: list[int] = []
        self._places: list[Place] = []
        self._lives = 0

    def write(self) -> Timeline:
        for storage in self._micro_steps.storages:
            if storage.allocated is None:
                self._append(self._life(), storage.bytes, Category.WEIGHTS, Place("forward-1", -1))
        states: dict[int, int] = {}
        for step in range(1, STEPS + 1):
            alive = self._play(self._micro_steps.events(), self._micro_steps.storages, {}, micro_step_category)
            stage = f"optimizer-{step}"
            events = [(place, event) for place, event in self._updates.events() if place.stage == stage]
            states = self._play(events, self._updates.storages, states, update_category)
            for index, life in alive.items():
                storage = self._micro_steps.storages[index]
                self._append(life, -storage.bytes, micro_step_category(storage), Place(stage, AFTER))
        return Timeline(
            sizes=np.array(self._sizes, dtype=np.int64),
            storages=np.array(self._storages, dtype=np.int64),
            categories=np.array(self._categories, dtype=np.int8),
            places=tuple(self._places),
        )

    def _play(
        self,
        events: Iterable[tuple[Place, Event]],
        storages: list[Storage],
        alive: dict[int, int],
        category: CategoryOf,
    ) -> dict[int, int]:
        """Write events; the storages that are alive after them, each with its life."""
        alive = dict(alive)
        for place, event in events:
            storage = storages[event.storage]
            if event.allocates:
                life = alive[event.storage] = self._life()
                self._append(life, storage.bytes, category(storage), place)
            elif event.storage in alive:
                self._append(alive.pop(event.storage), -storage.bytes, category(storage), place)
        return alive

    def _append(self, life: int, size: int, category: Category, place: Place) -> None:
        rounded = -(-abs(size) // self._rounding) * self._rounding
        self._sizes.append(rounded if size > 0 else -rounded)
        self._storages.append(life)
        self._categories.append(category)
        self._places.append(place)

    def _life(self) -> int:
        self._lives += 1
        return self._lives


def micro_step_category(storage: Storage) -> Category:
    """What a storage of a forward or backward holds, told by when it comes and goes."""
    if storage.allocated is None:
        return Category.WEIGHTS
    if storage.freed is None:
        return Category.GRADIENTS
    if storage.allocated.layer == AFTER:
        return Category.LOGITS_AND_LOSS
    if storage.recomputed or (storage.allocated.phase == "forward" and storage.freed.phase == "backward"):
        return Category.ACTIVATIONS
    return Category.TEMPORARIES


def update_category(storage: Storage) -> Category:
    """What a storage of an update holds."""
    return Category.OPTIMIZER if storage.freed is None else Category.TEMPORARIES
