"""The bound on regret: it holds as often as it says, and is no wider than one rival needs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from unit.operations.made_trials import fits

from autofit.core.frontier import Point
from autofit.core.lattice import Config
from autofit.core.outcome import StepSeconds
from autofit.core.repeatability import INTERVAL_DEVIATIONS
from autofit.search.acquisition.gains import regret_bound, timing_deviation
from autofit.search.acquisition.step_times import Mixture
from autofit.search.acquisition.surrogate import TIME


def timed(seconds: float, deviation: float | None, between: float = 0.0) -> Point:
    spread = None if deviation is None else INTERVAL_DEVIATIONS * deviation
    measured = fits(4, 512 / seconds).measurement
    steps = StepSeconds(median=seconds, p95=seconds, relative_spread=spread)
    config = Config.of({"method": "full"})
    return Point(config=config, measurement=replace(measured, step_seconds=steps), trial_id=None, between=between)


def rivals(*mean_and_deviation: tuple[float, float]) -> Mixture:
    """Under a single explanation."""
    mean, deviation = zip(*mean_and_deviation, strict=True)
    return Mixture(np.ones(1), np.array([mean]), np.array([deviation]))


NOBODY = Mixture(np.ones(1), np.empty((1, 0)), np.empty((1, 0)))


def test_without_rivals_there_is_none() -> None:
    assert regret_bound(timed(1.0, 0.1), NOBODY, np.array([])) == 0.0


def test_a_winner_far_ahead_has_none() -> None:
    assert regret_bound(timed(1.0, 0.01), rivals((1.0, 0.1)), np.ones(1)) == 0.0


def test_of_one_rival_it_is_the_quantile() -> None:
    """95 % of a normal variable lie below 1.6449 deviations above its mean."""
    bound = regret_bound(timed(2.0, 0.03), rivals((math.log(2.0), 0.04)), np.ones(1))
    assert bound == pytest.approx(1 - math.exp(-1.6448536 * 0.05), abs=1e-5)


@pytest.mark.filterwarnings("error")
def test_what_is_timed_exactly_is_known_exactly() -> None:
    slower, equal, faster = (
        regret_bound(timed(1.0, 0.0), rivals((math.log(seconds), 0.0)), np.ones(1)) for seconds in (2.0, 1.0, 0.5)
    )
    assert (slower, equal) == (0.0, pytest.approx(0.0, abs=1e-5))
    assert faster == pytest.approx(0.5, abs=1e-5)


def test_a_rival_counts_as_likely_as_it_fits() -> None:
    one = rivals((0.0, 0.05))
    sure, likely, hardly = (regret_bound(timed(1.0, 0.0), one, np.array([p])) for p in (1.0, 0.5, 0.04))
    assert sure > likely > hardly == 0.0
    assert likely == pytest.approx(1 - math.exp(-1.2815516 * 0.05), abs=1e-5)  # 90 %


def test_what_would_make_rivals_much_faster_counts_as_likely_as_it_is() -> None:
    """Under a first explanation they are hopeless; under a second, each would be ten times as fast."""

    def bound(wrong: float, many: int) -> float:
        mean = np.repeat([[math.log(2.0)], [math.log(0.1)]], many, axis=1)
        belief = Mixture(np.array([1.0 - wrong, wrong]), mean, np.full_like(mean, 0.02))
        return regret_bound(timed(1.0, 0.02), belief, np.ones(many))

    for many in (1, 200):  # however many hang on it, it is one chance
        assert bound(0.04, many) == 0.0
        assert bound(0.06, many) == pytest.approx(0.9, abs=0.01)


def test_a_rival_is_no_faster_than_the_work_that_it_shares() -> None:
    one, sure = rivals((math.log(0.5), 0.1)), np.ones(1)
    free, held = (
        regret_bound(timed(1.0, 0.02), one, sure, [(1.0, least)]) for least in (-math.inf, np.array([math.log(0.97)]))
    )
    assert free > 0.5
    assert held == pytest.approx(0.03)


def test_what_no_spread_is_known_of_has_the_usual_noise() -> None:
    assert timing_deviation(timed(1.0, None)) == TIME.noise


def test_two_steps_that_agree_by_chance_are_no_certainty() -> None:
    """A trial that was stopped early may have met a slow moment: what it has not shown counts against the winner."""
    full = timed(1.3, 0.001)
    early = replace(full, measurement=replace(full.measurement, stopped_early=True))
    noisy = replace(timed(1.3, 0.2), measurement=replace(timed(1.3, 0.2).measurement, stopped_early=True))
    assert [timing_deviation(p) for p in (full, early, noisy)] == pytest.approx([0.001, 0.08, 0.2])


def test_what_executions_differ_by_is_added_in_quadrature() -> None:
    assert timing_deviation(timed(1.0, 0.03)) == pytest.approx(0.03)
    assert timing_deviation(timed(1.0, 0.03, between=0.04)) == pytest.approx(0.05)
    bound = regret_bound(timed(2.0, 0.03, between=0.04), rivals((math.log(2.0), 0.0)), np.ones(1))
    assert bound == pytest.approx(1 - math.exp(-1.6448536 * 0.05), abs=1e-5)


def test_it_holds_as_often_as_it_says() -> None:
    """Worlds drawn from the beliefs themselves: the truth of the winner and of each rival, and which of them fit."""
    draw = np.random.default_rng(5)
    held, worlds = 0, 4000
    mean, deviation = draw.normal(0.02, 0.05, 12), draw.uniform(0.01, 0.08, 12)
    probability = draw.uniform(0.0, 1.0, 12)
    bound = regret_bound(timed(1.0, 0.02), Mixture(np.ones(1), mean[None], deviation[None]), probability)
    for _ in range(worlds):
        winner = draw.normal(0.0, 0.02)
        times = np.where(draw.random(12) < probability, draw.normal(mean, deviation), np.inf)
        held += 1.0 - math.exp(min(float(times.min()) - winner, 0.0)) <= bound
    assert held / worlds >= 0.95
    assert 0.0 < bound < 0.2
