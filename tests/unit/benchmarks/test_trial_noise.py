"""What the benchmark of repeats says of made-up speeds."""

from __future__ import annotations

import importlib
import math
import random
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("trial_noise")


def test_the_worst_split_is_of_all_splits(script: Any) -> None:
    assert script.worst_split([100.0, 110.0, 100.0, 110.0]) == pytest.approx(0.1)
    assert script.worst_split([100.0, 110.0]) == pytest.approx(0.1)
    assert script.spread_of([90.0, 100.0, 110.0]) == pytest.approx(0.2)


def test_each_trial_is_judged_by_what_the_others_show(script: Any) -> None:
    lonely = [100.0, 100.0, 100.0, 150.0]
    between = script.differences_of_the_others(lonely, [0.0] * 4)
    assert between[3] == 0.0 and min(between[:3]) > 0.1


def test_intervals_of_trials_that_differ_by_more_than_their_steps_hold_the_median_once_that_is_added(
    script: Any,
) -> None:
    draw = random.Random(0)
    held = {False: 0.0, True: 0.0}
    for _ in range(200):
        speeds = [200.0 * math.exp(draw.gauss(0, 0.04)) for _ in range(10)]
        spreads = [0.05] * 10
        between = script.differences_of_the_others(speeds, spreads)
        wider = [script.widened(spread, more) for spread, more in zip(spreads, between, strict=True)]
        held[False] += script.covering(speeds, spreads) / 200
        held[True] += script.covering(speeds, wider) / 200
    assert held[False] < 0.6 and held[True] > 0.8


def test_products_are_timed_for_a_moment(script: Any) -> None:
    assert script.products_a_second(0.01) > 0.0
