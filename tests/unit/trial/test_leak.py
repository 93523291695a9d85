"""Growth of memory from step to step is told from a heap's settling, trimming and jumping."""

from __future__ import annotations

import random

import pytest

from autofit.core.units import MIB
from autofit.trial.measure.figures import LEAK_STEPS, leak, may_leak

FLOOR = 4 * MIB

STEADY = {
    "at every step": [100, 150, 200, 250, 300, 350],
    "though it was trimmed once": [100, 150, 200, 199, 250, 300],
    "though much was given back at the end": [100, 150, 200, 250, 300, 350, 400, 320],
}
NONE = {
    "constant": [100] * 8,
    "one jump": [100, 100, 100, 300, 300, 300],
    "two jumps": [100, 100, 200, 200, 200, 300, 300],
    "it settles": [100, 180, 190, 191, 191, 191, 191],
    "it falls": [300, 250, 200, 150, 100, 50],
    "climbs, and is collected": [100, 110, 120, 100, 110, 120, 100, 110, 120],
    "too few steps to tell": [100, 150, 200, 250, 300],
}
"""MiB in use after each step."""


def mib(values: list[int]) -> list[int]:
    return [value * MIB for value in values]


@pytest.mark.parametrize("case", STEADY)
def test_steady_growth_is_a_leak(case: str) -> None:
    assert leak(mib(STEADY[case]), FLOOR) == pytest.approx(50 * MIB, rel=0.35)


@pytest.mark.parametrize("case", NONE)
def test_other_changes_are_none(case: str) -> None:
    assert leak(mib(NONE[case]), FLOOR) == 0


def test_a_heaps_noise_is_none() -> None:
    """Up to a multiple of the floor, up and down, whatever the draw."""
    leaks = []
    for seed in range(300):
        draw = random.Random(seed)
        leaks.append(leak([500 * MIB + draw.randrange(8 * MIB) for _ in range(LEAK_STEPS + seed % 5)], FLOOR))
    assert not any(leaks)


def test_growth_is_told_from_scatter() -> None:
    """As a large model's heap: tens of MiB up and down, with a tail. Without growth, and with 20 MiB at every step."""
    none, grown = [], []
    for seed in range(300):
        draw = random.Random(seed)
        sizes = [
            1600 * MIB + int(draw.gauss(0, 25 * MIB)) - (150 * MIB if draw.random() < 0.05 else 0) for _ in range(14)
        ]
        none.append(leak(sizes, FLOOR))
        grown.append(leak([size + 20 * MIB * step for step, size in enumerate(sizes)], FLOOR))
    assert sum(map(bool, none)) <= 1
    assert sum(map(bool, grown)) >= 270


def test_what_a_counter_cannot_tell_from_noise_is_its_own() -> None:
    growing = mib([100 + 3 * step for step in range(8)])
    assert leak(growing, FLOOR) == 0
    assert leak(growing, MIB) == 3 * MIB


@pytest.mark.parametrize(
    ("in_use", "expected"),
    [
        ([100, 150, 200], True),
        ([100, 150, 200, 250, 300], True),
        ([100, 150, 150], False),
        ([100, 150, 200, 203], False),
        ([100, 150, 140, 190], False),
        ([100, 150, 200, 250, 300, 350], False),
    ],
)
def test_more_steps_are_worth_it_while_every_one_so_far_left_something(in_use: list[int], expected: bool) -> None:
    assert may_leak(mib(in_use), FLOOR, most=LEAK_STEPS) is expected
    assert not may_leak(mib(in_use), FLOOR, most=LEAK_STEPS - 1), "there is no time to tell"


@pytest.mark.parametrize("growth", [STEADY["at every step"], STEADY["though much was given back at the end"]])
def test_who_goes_on_while_memory_may_leak_learns_whether_it_does(growth: list[int]) -> None:
    steps = next(count for count in range(3, len(growth) + 1) if not may_leak(mib(growth[:count]), FLOOR, most=99))
    assert steps == LEAK_STEPS
    assert leak(mib(growth[:steps]), FLOOR) == 50 * MIB
