"""The hypervolume against a count of cells, and what a hypervolume must do."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.bench.recorded import hypervolume

SIDE = 12
Points = list[tuple[int, int]]
POINTS = st.lists(st.tuples(st.integers(-2, SIDE + 2), st.integers(-2, SIDE + 2)), max_size=12)


def cells(points: Points, reference: tuple[int, int]) -> int:
    """Unit squares between the reference point and some point: the area, where all corners are whole numbers."""
    most, slowest = reference
    return sum(
        any(memory <= x and speed >= y + 1 for memory, speed in points)
        for x in range(-2, most)
        for y in range(slowest, SIDE + 2)
    )


@given(points=POINTS, most=st.integers(0, SIDE), slowest=st.integers(0, SIDE))
def test_it_is_the_area_of_the_cells(points: Points, most: int, slowest: int) -> None:
    assert hypervolume(points, (most, slowest)) == cells(points, (most, slowest))


@given(points=POINTS, more=POINTS)
def test_more_points_never_have_less(points: Points, more: Points) -> None:
    assert hypervolume(points + more, (SIDE, 0)) >= hypervolume(points, (SIDE, 0))


@given(points=POINTS, seed=st.integers(0, 9))
def test_neither_order_nor_repeats_nor_beaten_points_count(points: Points, seed: int) -> None:
    beaten = [(memory + 1, speed - 1) for memory, speed in points]
    mixed = points + points + beaten
    random.Random(seed).shuffle(mixed)
    assert hypervolume(mixed, (SIDE, 0)) == hypervolume(points, (SIDE, 0))


def test_a_staircase_by_hand() -> None:
    assert hypervolume([(2.0, 10.0), (4.0, 30.0), (5.0, 20.0)], (10.0, 0.0)) == pytest.approx(8 * 10 + 6 * 20)
    assert hypervolume([], (10.0, 0.0)) == 0.0
    assert hypervolume([(10.0, 5.0), (3.0, 0.0)], (10.0, 0.0)) == 0.0  # on the reference's own edges
