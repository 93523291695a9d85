"""Trajectories of traces that were made by hand."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace

import pytest
from unit.bench.made_tables import of_outcomes, trace
from unit.operations.made_trials import fits, out_of_memory
from unit.search.made_truth import Truth

from autofit.bench.oracle import HORIZON
from autofit.bench.recorded import Recorded
from autofit.bench.score import MOMENTS, Band, moments, trajectory
from autofit.core.lattice import Config

OUTCOMES = (fits(1.0, 100), fits(0.5, 50), fits(0.8, 90), out_of_memory())


@pytest.fixture
def configs(truth: Truth) -> list[Config]:
    """As many as there are outcomes."""
    return [c for c in truth.lattice.configs if c["method"] == "full"][: len(OUTCOMES)]


@pytest.fixture
def table(truth: Truth, configs: list[Config]) -> Recorded:
    """A table of them; the trials took 2, 4, 8 and 16 seconds."""
    made = of_outcomes(truth, dict(zip(configs, OUTCOMES, strict=True)))
    seconds = {config: 2.0 ** (number + 1) for number, config in enumerate(configs)}
    return replace(made, trials={c: replace(t, seconds=seconds[c]) for c, t in made.trials.items()})


def test_the_best_so_far_after_each_trial(table: Recorded, configs: list[Config]) -> None:
    found = trajectory(table, [trace(table, [configs[i] for i in (3, 1, 2, 1, 0)])])
    assert found.speed.median == (0.0, 0.5, 0.9, 0.9, *[1.0] * (HORIZON - 4))
    assert found.speed.p10 == found.speed.median == found.speed.p90


def test_the_share_of_the_frontier_is_that_of_the_score(table: Recorded, configs: list[Config]) -> None:
    made = trace(table, [configs[i] for i in (3, 1, 0, 2)])
    found = trajectory(table, [made]).hypervolume.median
    assert found == tuple(
        round(table.share_of_frontier(run.outcome for run in made.runs[:number]), 4) for number in range(1, HORIZON + 1)
    )
    assert found[0] == 0.0 < found[1] < found[2] < found[3] == found[-1] == 1.0


def test_the_best_of_what_has_ended_by_a_moment(table: Recorded, configs: list[Config]) -> None:
    times = moments(table)
    assert len(times) == MOMENTS and (times[0], times[-1]) == (2.0, 30.0)
    ratios = [b / a for a, b in itertools.pairwise(times)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))
    found = trajectory(table, [trace(table, [configs[i] for i in (1, 2, 0)], seconds=5.0)])
    assert found.seconds == pytest.approx(times, rel=1e-3)
    expected = [0.0 if time < 5 else 0.5 if time < 10 else 0.9 if time < 15 else 1.0 for time in times]
    assert list(found.speed_by_seconds.median) == expected


def test_over_the_seeds_by_nearest_rank() -> None:
    ten = [[n / 10] for n in range(10)]
    assert Band.of(ten) == Band(median=(0.45,), p10=(0.1,), p90=(0.8,))
    assert Band.of(ten + ten[1:2]) == Band(median=(0.4,), p10=(0.1,), p90=(0.8,))
    assert Band.of([[0.25, 1.0]]) == Band(median=(0.25, 1.0), p10=(0.25, 1.0), p90=(0.25, 1.0))


def test_a_search_that_found_nothing_stays_at_nothing(table: Recorded, configs: list[Config]) -> None:
    found = asdict(trajectory(table, [trace(table, [configs[3]])]))
    for band in ("speed", "hypervolume", "speed_by_seconds"):
        assert set(found[band]["p90"]) == {0.0}
