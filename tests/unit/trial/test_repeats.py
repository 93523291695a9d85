"""The spread that is stored must cover the truth as often as it says."""

from __future__ import annotations

import random
import statistics

import pytest

from autofit.trial.measure.figures import relative_spread


def test_a_single_repeat_has_no_spread_and_equal_ones_have_none_at_all() -> None:
    assert relative_spread([1.0]) is None
    assert relative_spread([2.0, 2.0, 2.0]) == 0.0


@pytest.mark.parametrize("repeats", [3, 5, 10, 30])
def test_the_interval_covers_the_true_step_time_nine_times_in_ten(repeats: int) -> None:
    draw = random.Random(0)
    covered = 0
    for _ in range(2000):
        sample = [draw.gauss(1.0, 0.08) for _ in range(repeats)]
        spread = relative_spread(sample)
        assert spread is not None
        middle = statistics.median(sample)
        covered += abs(middle - 1.0) <= spread * middle / 2
    assert 0.87 <= covered / 2000 <= 0.95
