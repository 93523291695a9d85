"""Growth of memory from step to step is told from a heap's settling, trimming and jumping."""

from __future__ import annotations

import random

import pytest

from autofit.trial.leak import LEAK_STEPS, leak
from autofit.units import MIB

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
    found = []
    for seed in range(300):
        draw = random.Random(seed)
        found.append(leak([500 * MIB + draw.randrange(8 * MIB) for _ in range(LEAK_STEPS + seed % 5)], FLOOR))
    assert not any(found)


def test_what_a_counter_cannot_tell_from_noise_is_its_own() -> None:
    growing = mib([100 + 3 * step for step in range(8)])
    assert leak(growing, FLOOR) == 0
    assert leak(growing, MIB) == 3 * MIB
