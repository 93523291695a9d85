"""What executions of one config differ by, learnt from those that ran again: it comes out as it was put in."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from autofit.core.repeatability import INTERVAL_DEVIATIONS, Execution, between_executions, widened


def drawn(draw: random.Random, runs: int, between: float, within: float) -> list[Execution]:
    """Executions of one config of 200 tokens/s, about: each off by what executions and its own steps differ by."""
    speed = 200.0 * draw.uniform(0.1, 10)
    return [
        (speed * math.exp(draw.gauss(0, between) + draw.gauss(0, within)), INTERVAL_DEVIATIONS * within)
        for _ in range(runs)
    ]


def test_where_nothing_was_repeated_nothing_is_known() -> None:
    assert between_executions([]) == 0.0
    assert between_executions([[], [(100.0, 0.1)], [(200.0, 0.1)]]) == 0.0


def test_what_their_own_intervals_explain_is_no_difference_between_executions() -> None:
    assert between_executions([[(100.0, 0.1), (101.0, 0.1)]]) == 0.0
    assert between_executions([[(100.0, 0.0), (100.0, 0.0)]]) == 0.0


def test_a_single_pair_does_not_decide() -> None:
    pair = [(100.0, 0.0), (110.0, 0.0)]
    alone = between_executions([pair])
    assert alone == pytest.approx(statistics.stdev(math.log(s) for s, _ in pair) / math.sqrt(1 + 4))
    agreeing = [[(speed, 0.0), (speed, 0.0)] for speed in (50.0, 200.0, 400.0)]
    assert between_executions([pair, *agreeing]) < alone < between_executions([pair] * 4)


def test_two_halves_of_one_configs_speeds_are_told_alike_in_any_unit() -> None:
    executions = [(100.0, 0.02), (110.0, 0.03), (95.0, 0.01)]
    assert between_executions([[(7 * s, w) for s, w in executions]]) == pytest.approx(between_executions([executions]))


@pytest.mark.parametrize(("configs", "runs"), [(300, 2), (60, 10)])
@pytest.mark.parametrize(("between", "within"), [(0.03, 0.02), (0.02, 0.04), (0.0, 0.03)])
def test_what_was_put_in_comes_out_of_many(configs: int, runs: int, between: float, within: float) -> None:
    draw = random.Random(1)
    estimated = between_executions([drawn(draw, runs, between, within) for _ in range(configs)])
    assert estimated == pytest.approx(between, abs=0.004 if between else 0.012)


def test_the_widened_interval_holds_the_truth_nine_times_in_ten() -> None:
    draw = random.Random(2)
    between, within = 0.03, 0.015
    estimated = between_executions([drawn(draw, 2, between, within) for _ in range(200)])
    held = {False: 0, True: 0}
    for _ in range(3000):
        offset = draw.gauss(0, between) + draw.gauss(0, within)
        width = INTERVAL_DEVIATIONS * within
        held[False] += abs(offset) <= width / 2
        held[True] += abs(offset) <= widened(width, estimated) / 2
    assert 0.87 <= held[True] / 3000 <= 0.93
    assert held[False] / 3000 < 0.65


def test_what_is_not_known_widens_nothing() -> None:
    assert widened(0.064, 0.0) == 0.064
