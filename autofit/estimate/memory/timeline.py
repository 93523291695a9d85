"""The memory of two whole optimizer steps, event by event: when the peak is, and what is alive there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autofit.core.outcome import ALL_PHASES, PHASES
from autofit.estimate.kernels import column_sums
from autofit.estimate.memory.events import Evaluation, Events, Integers, MicroSteps, Storages, Updates
from autofit.estimate.memory.memory_trace import Category
from autofit.estimate.memory.symbolic_sizes import SymbolicSizes, joined


@dataclass(frozen=True, slots=True)
class Timeline:
    """Parallel arrays, one entry per event; weights are allocated first. Peaks are those of the steps."""

    sizes: Integers
    """Bytes, as the allocator rounds them; negative where a storage is freed."""
    storages: Integers
    """Which storage; each lifetime has its own number."""
    categories: NDArray[np.int8]
    phases: Integers
    """Index in ALL_PHASES."""
    streams: NDArray[np.int8]
    """Stream of the device on which each storage is allocated."""
    of_products: NDArray[np.bool_]
    """Whether each storage is the result of a matrix product."""
    setup: int
    """How many of the first events precede the first step."""
    second: int
    """The first event of the second step."""
    evaluation: int
    """The first event of the evaluation that follows the second step; the number of events if there is none."""

    def renewed(self) -> list[tuple[int, int]]:
        """The storages that the second step frees though it did not make them, each with the one that it leaves in
        its place: states that an update replaces."""
        step = slice(self.second, self.evaluation)
        storages, sizes = self.storages[step], self.sizes[step]
        born, died = storages[sizes > 0], storages[sizes < 0]
        return list(zip(died[~np.isin(died, born)].tolist(), born[~np.isin(born, died)].tolist(), strict=True))

    @property
    def totals(self) -> Integers:
        """Bytes in use after each event."""
        return np.cumsum(self.sizes)

    def peak(self) -> int:
        """The most bytes in use."""
        return int(self.totals[self._fullest])

    def phase_peaks(self) -> dict[str, int]:
        """The most bytes in use in each phase."""
        return self.by_phase(self.totals)

    def by_phase(self, totals: Integers) -> dict[str, int]:
        """The most of `totals`, a figure for each event, in each phase."""
        present = PHASES if self.evaluation == len(totals) else ALL_PHASES
        begin = self.ready
        phases, totals = self.phases[begin:], totals[begin:]
        return {phase: int(totals[phases == index].max(initial=0)) for index, phase in enumerate(present)}

    @property
    def peaks_in_evaluation(self) -> bool:
        return self._fullest >= self.evaluation

    @property
    def ready(self) -> int:
        """The event after which all is there that precedes the first step."""
        return max(self.setup - 1, 0)

    @property
    def _fullest(self) -> int:
        return self.ready + int(self.totals[self.ready :].argmax())

    def breakdown(self, at: int | None = None) -> dict[Category, int]:
        """Bytes of each category after the event `at`; by default at the moment of the peak."""
        until = (self._fullest if at is None else at) + 1
        amounts = np.bincount(self.categories[:until], weights=self.sizes[:until], minlength=len(Category))
        return {category: int(amounts[category]) for category in Category}


def timeline(
    steps: MicroSteps,
    updates: Updates | None,
    evaluation: Evaluation | None = None,
    *,
    batch: Sequence[int],
    micro_batch: int,
    rank: int,
    accumulates: bool,
    rounding: int,
    blocks: int = 0,
) -> Timeline:
    """Two optimizer steps: one micro-step, or two if it `accumulates`, then the update, which frees the gradients.
    Without `updates` the backward pass has them, and both steps are given. After the second, the `evaluation`.

    `batch` has the bytes of the tokens of all micro-batches, which stay, and of the labels of each, which a step makes.
    Every size is rounded up to a multiple of `rounding` bytes, as the device's allocator does. `blocks` are what a card
    runs at a time (`column_sums`).
    """
    parts = [part.storages for part in (steps, updates) if part is not None]
    tokens = sum(len(part.categories) for part in parts)
    labels = np.arange(tokens + 1, tokens + len(batch))
    parts += [_batch(batch), *([] if evaluation is None else [evaluation.storages])]
    storages = joined(parts)
    sizes = _rounded(_with_sums(storages, storages.sizes.at(micro_batch, rank), blocks), rounding)
    lives = len(storages.categories)
    setup = joined([steps.setup, _allocated(np.array([tokens]))])
    first, second = (
        joined([_allocated(labels + step * lives), events, _freed(labels + step * lives)])
        for step, events in enumerate(
            _whole(steps) if updates is None else _updated(steps, updates, lives, accumulates)
        )
    )
    of_steps = joined([setup, first, second])
    events = of_steps
    if evaluation is not None:
        begin = lives - len(evaluation.storages.categories)
        events = joined([of_steps, _shifted(evaluation.events, lives + begin)])
    which = events.storages % lives
    return Timeline(
        sizes=events.signs * sizes[which],
        storages=events.storages,
        categories=storages.categories[which],
        phases=events.phases,
        streams=storages.streams[which],
        of_products=storages.of_products[which],
        setup=len(setup.storages),
        second=len(setup.storages) + len(first.storages),
        evaluation=len(of_steps.storages),
    )


def _whole(steps: MicroSteps) -> list[Events]:
    """Two steps that update within their backward pass: what is left of each then goes, but for the states."""
    lasts = steps.storages.categories == Category.OPTIMIZER
    return [joined([part, _freed(_alive(part, lasts))]) for part in (steps.first, steps.second)]


def _alive(events: Events, besides: NDArray[np.bool_]) -> Integers:
    """The storages that `events` leave allocated, without those `besides`."""
    balance = np.bincount(events.storages, weights=events.signs, minlength=len(besides))
    return np.flatnonzero((balance > 0) & ~besides)


def _updated(steps: MicroSteps, updates: Updates, lives: int, accumulates: bool) -> list[Events]:
    """Two steps, each with its update at the end. Gradients then go in the order of their parameters, which is about
    the reverse of that in which they came. In the second, storages are new ones, `lives` further on, except for
    those that persist: the weights and states."""
    offset = len(steps.storages.categories)
    micro = joined([steps.first, steps.second]) if accumulates else steps.first
    alive = _alive(micro, np.zeros(offset, dtype=np.bool_))
    return [
        joined(
            [
                _shifted(micro, step * lives),
                _states_shared(update, offset, updates, step * lives),
                _freed(alive[::-1] + step * lives),
            ]
        )
        for step, update in enumerate((updates.first, updates.second))
    ]


def _with_sums(storages: Storages, sizes: NDArray[np.float64], blocks: int) -> NDArray[np.float64]:
    """The bytes of storages, of whose sizes those in which columns are summed up have values
    (`Storage.summed_columns`)."""
    columns, rows = storages.summed_columns, storages.summed_rows
    to_one, by_entry = np.flatnonzero((columns > 0) & (rows == 0)), np.flatnonzero(rows)
    sizes[to_one] = column_sums.taken(sizes[to_one], columns[to_one], blocks)
    sizes[by_entry] = column_sums.taken_by_entry(sizes[by_entry], columns[by_entry], rows[by_entry])
    return sizes


def _rounded(sizes: NDArray[np.float64], multiple: int) -> Integers:
    return -(-np.ceil(sizes).astype(np.int64) // multiple) * multiple


def _batch(sizes: Sequence[int]) -> Storages:
    none = np.zeros(len(sizes), dtype=np.int64)
    return Storages(
        sizes=SymbolicSizes.constant(sizes),
        categories=np.full(len(sizes), Category.ACTIVATIONS, dtype=np.int8),
        streams=none.astype(np.int8),
        of_products=none.astype(np.bool_),
        summed_columns=none,
        summed_rows=none,
    )


def _allocated(storages: Integers) -> Events:
    """What is there before a forward pass."""
    return Events(storages, np.ones_like(storages), np.full_like(storages, PHASES.index("forward")))


def _freed(storages: Integers) -> Events:
    """What goes at the end of a step: the gradients and the labels."""
    return Events(storages, -np.ones_like(storages), np.full_like(storages, PHASES.index("optimizer")))


def _shifted(events: Events, by: int) -> Events:
    return Events(events.storages + by, events.signs, events.phases)


def _states_shared(events: Events, offset: int, updates: Updates, by: int) -> Events:
    """An update's events; states keep their numbers, so that a later update may free what an earlier one created."""
    is_renumbered = updates.storages.categories[events.storages] != Category.OPTIMIZER
    return Events(events.storages + offset + np.where(is_renumbered, by, 0), events.signs, events.phases)
