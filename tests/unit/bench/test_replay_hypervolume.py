"""The hypervolume against a count of cells, and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.bench.recorded import hypervolume

SIDE = 12
Points = list[tuple[int, int]]
POINTS = st.lists(st.tuples(st.integers(-2, SIDE + 2), st.integers(-2, SIDE + 2)), max_size=12)


def cells(points: Points, most: int) -> int:
    """Unit squares between the reference point and some point: the area, where all corners are whole numbers."""
    return sum(
        any(memory <= x and speed >= y + 1 for memory, speed in points)
        for x in range(-2, most)
        for y in range(SIDE + 2)
    )


@given(points=POINTS, most=st.integers(0, SIDE))
def test_it_is_the_area_of_the_cells(points: Points, most: int) -> None:
    assert hypervolume(points, most) == cells(points, most)


def test_a_staircase_by_hand() -> None:
    assert hypervolume([(2.0, 10.0), (4.0, 30.0), (5.0, 20.0)], 10.0) == pytest.approx(8 * 10 + 6 * 20)
    assert hypervolume([], 10.0) == 0.0
    assert hypervolume([(10.0, 5.0), (3.0, 0.0)], 10.0) == 0.0  # on the reference's own edges
