"""What the C library's heap takes beside the tensors of a processor's step."""

from __future__ import annotations

import numpy as np
import pytest

from autofit.estimate.memory.heap import MIB, SIZE_POWER, Traits, causes, kept, resident
from autofit.estimate.memory.memory import host_memory
from autofit.estimate.memory.memory_trace import Category
from autofit.estimate.memory.timeline import Timeline

WEIGHTS, SAVED, TEMPORARY, MAPPED, GRADIENT, PASSING, STATE = range(7)
SIZES = {
    WEIGHTS: 100 * MIB,
    SAVED: 20 * MIB,
    TEMPORARY: 16 * MIB,
    MAPPED: 50 * MIB,
    GRADIENT: 3 * MIB,
    PASSING: 9 * MIB,
    STATE: 2 * MIB,
}
FORWARD, BACKWARD, OPTIMIZER = range(3)


def line(*events: tuple[int, int, int]) -> Timeline:
    """From (storage, sign, phase)."""
    return Timeline(
        sizes=np.array([sign * SIZES[storage % 10] for storage, sign, _ in events]),
        storages=np.array([storage for storage, _, _ in events]),
        categories=np.array([Category.GRADIENTS if storage % 10 == GRADIENT else 0 for storage, _, _ in events]),
        phases=np.array([phase for _, _, phase in events]),
        streams=np.zeros(len(events), dtype=np.int8),
        of_products=np.zeros(len(events), dtype=np.bool_),
        setup=1,
        second=len(events),
        evaluation=len(events),
    )


def step(by: int, *, creates: bool) -> list[tuple[int, int, int]]:
    saved, temporary, mapped, gradient = (by + n for n in (SAVED, TEMPORARY, MAPPED, GRADIENT))
    passing = by + PASSING
    return [
        *[(temporary, 1, FORWARD), (saved, 1, FORWARD), (temporary, -1, FORWARD), (mapped, 1, FORWARD)],
        *[(gradient, 1, BACKWARD), (mapped, -1, BACKWARD), (saved, -1, BACKWARD)],
        *[(passing, 1, OPTIMIZER), *([(STATE, 1, OPTIMIZER)] if creates else []), (passing, -1, OPTIMIZER)],
        (gradient, -1, OPTIMIZER),
    ]


TWO_STEPS = line((WEIGHTS, 1, FORWARD), *step(0, creates=True), *step(10, creates=False))


def test_a_heap_follows_from_what_passes_and_what_stays_and_not_from_what_is_mapped() -> None:
    passing, saved = 16 * MIB * 16.0**SIZE_POWER, 20 * MIB * 20.0**SIZE_POWER
    assert causes(TWO_STEPS, Traits()).tolist() == [1.0, passing, 0.0, 0.0, 0.0, saved, 0.0, 0.0]
    for place, trait in enumerate(("wide", "autocast", "dequantises"), 2):
        found = causes(TWO_STEPS, Traits(**{trait: True})).tolist()
        assert found[place] == passing and sum(found[2:5]) == passing


def test_states_that_are_made_among_copies_of_them_find_no_holes() -> None:
    assert causes(TWO_STEPS, Traits(quantised_states=True))[6] == 2 * MIB
    assert causes(TWO_STEPS, Traits())[6] == 0.0


def test_gradients_that_go_to_the_host_leave_holes_and_those_that_stay_do_not() -> None:
    handed_on = [*step(10, creates=False)[:7], (GRADIENT + 10, -1, BACKWARD)]
    found = line((WEIGHTS, 1, FORWARD), *step(0, creates=True), *handed_on)
    assert causes(found, Traits(offloads=True))[7] == 3 * MIB
    assert causes(found, Traits())[7] == 0.0
    assert causes(TWO_STEPS, Traits(offloads=True))[7] == 0.0


def test_only_the_last_forward_counts() -> None:
    more = [(TEMPORARY + 20, 1, FORWARD), (TEMPORARY + 20, -1, FORWARD), (SAVED + 20, 1, FORWARD)]
    longer = line((WEIGHTS, 1, FORWARD), *more, *step(0, creates=True), *step(10, creates=True))
    assert causes(longer, Traits())[1:].tolist() == causes(TWO_STEPS, Traits())[1:].tolist()


def test_the_heap_does_not_shrink_and_what_is_mapped_does() -> None:
    found = resident(line((WEIGHTS, 1, 0), (SAVED, 1, 0), (MAPPED, 1, 0), (SAVED, -1, 1), (MAPPED, -1, 1)))
    assert (found / MIB).tolist() == [100, 120, 170, 170, 120]


def test_the_parts_of_a_processors_memory_add_up_to_its_peak() -> None:
    found = host_memory(TWO_STEPS, Traits())
    assert found.device_bytes == sum(found.breakdown.values()) == max(found.phase_peaks.values())
    assert found.breakdown["fragmentation"] == pytest.approx(kept(TWO_STEPS, Traits()), abs=17 * MIB)
    assert host_memory(TWO_STEPS, Traits(wide=True)).device_bytes > found.device_bytes
    assert host_memory(TWO_STEPS, Traits(autocast=True)).device_bytes > found.device_bytes
