"""What the C library's heap takes beside the tensors of a processor's step."""

from __future__ import annotations

import numpy as np
import pytest

from autofit.estimate.heap import MIB, SIZE_POWER, causes, kept, resident
from autofit.estimate.memory import memory
from autofit.estimate.timeline import Timeline
from autofit.hardware import Hardware
from autofit.units import GIB

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
CPU = Hardware(name="c", kind="cpu", device_name="c", memory_bytes=1)


def line(*events: tuple[int, int, int]) -> Timeline:
    """From (storage, sign, phase)."""
    return Timeline(
        sizes=np.array([sign * SIZES[storage % 10] for storage, sign, _ in events]),
        storages=np.array([storage for storage, _, _ in events]),
        categories=np.zeros(len(events), dtype=np.int8),
        phases=np.array([phase for _, _, phase in events]),
        streams=np.zeros(len(events), dtype=np.int8),
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
    passing = 16 * MIB * 16.0**SIZE_POWER
    assert causes(TWO_STEPS, wide=False, autocast=False).tolist() == [1.0, passing, 0.0, 0.0, 20 * MIB, 2 * MIB]
    assert causes(TWO_STEPS, wide=True, autocast=False).tolist() == [1.0, passing, passing, 0.0, 20 * MIB, 2 * MIB]
    assert causes(TWO_STEPS, wide=False, autocast=True).tolist() == [1.0, passing, 0.0, passing, 20 * MIB, 2 * MIB]


def test_only_the_last_forward_and_the_first_update_count() -> None:
    more = [(TEMPORARY + 20, 1, FORWARD), (TEMPORARY + 20, -1, FORWARD), (SAVED + 20, 1, FORWARD)]
    longer = line((WEIGHTS, 1, FORWARD), *more, *step(0, creates=True), *step(10, creates=True))
    assert (
        causes(longer, wide=False, autocast=False)[1:].tolist()
        == causes(TWO_STEPS, wide=False, autocast=False)[1:].tolist()
    )


def test_an_update_on_the_host_leaves_nothing_here() -> None:
    events = [event for event in step(0, creates=False) if event[2] != OPTIMIZER]
    assert causes(line((WEIGHTS, 1, FORWARD), *events, *events[:3]), wide=False, autocast=False)[5] == 0.0


def test_the_heap_does_not_shrink_and_what_is_mapped_does() -> None:
    found = resident(line((WEIGHTS, 1, 0), (SAVED, 1, 0), (MAPPED, 1, 0), (SAVED, -1, 1), (MAPPED, -1, 1)))
    assert (found / MIB).tolist() == [100, 120, 170, 170, 120]


def test_the_parts_of_a_processors_memory_add_up_to_its_peak() -> None:
    found = memory(TWO_STEPS, CPU, limit=GIB)
    assert found.device_bytes == sum(found.breakdown.values()) == max(found.phase_peaks.values())
    assert found.breakdown["fragmentation"] == pytest.approx(kept(TWO_STEPS, wide=False, autocast=False), abs=17 * MIB)
    assert memory(TWO_STEPS, CPU, limit=GIB, wide=True).device_bytes > found.device_bytes
    assert memory(TWO_STEPS, CPU, limit=GIB, autocast=True).device_bytes > found.device_bytes
