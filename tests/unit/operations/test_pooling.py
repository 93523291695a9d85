"""Several passes as one table: the mean, how far one more trial may come out, and the cautious reading."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from unit.operations.made_trials import fits, make_trial, out_of_memory

from autofit.core.outcome import Fits, Trial
from autofit.operations.recording.pooling import pooled


def passes(*outcomes: Fits, micro_batch: int = 4) -> list[Trial]:
    return [make_trial({"method": "full", "micro_batch": micro_batch}, outcome) for outcome in outcomes]


def only(trials: list[Trial]) -> Trial:
    (found,) = pooled({trials[0].config: trials}).values()
    return found


def test_what_ran_once_stays_as_it_was() -> None:
    (trial,) = passes(fits(10, 1000))
    assert only([trial]) is trial


def test_the_speed_is_the_mean_of_the_passes_and_the_memory_that_of_the_middle_one() -> None:
    found = only(passes(fits(10, 900), fits(11, 1000), fits(12, 1300)))
    assert isinstance(found.outcome, Fits)
    measured = found.outcome.measurement
    assert measured.tokens_per_second == pytest.approx((900 * 1000 * 1300) ** (1 / 3))
    assert measured.step_seconds.median * measured.tokens_per_second == pytest.approx(512)
    assert measured.step_seconds.median < measured.step_seconds.p95
    assert measured.device_bytes == fits(11, 1000).measurement.device_bytes


def test_what_ran_out_in_any_pass_counts_as_that() -> None:
    trials = passes(fits(10, 1000), fits(10, 1000))
    ran_out = make_trial(trials[0].config, out_of_memory())
    for order in ([*trials, ran_out], [ran_out, *trials]):
        assert only(order).outcome == ran_out.outcome


def test_the_interval_holds_nine_in_ten_of_further_trials() -> None:
    source = random.Random(0)
    true = {micro_batch: source.uniform(500, 2000) for micro_batch in (1, 2, 4, 8, 16, 32)}

    def drawn(micro_batch: int) -> float:
        return true[micro_batch] * math.exp(source.gauss(0.0, 0.05))

    runs = {n: passes(*(fits(10, drawn(n)) for _ in range(20)), micro_batch=n) for n in true}
    found = pooled({trials[0].config: trials for trials in runs.values()})
    spreads, held = set(), []
    for n, trial in zip(true, found.values(), strict=True):
        assert isinstance(trial.outcome, Fits)
        measured = trial.outcome.measurement
        spread = measured.step_seconds.relative_spread
        assert spread is not None
        spreads.add(spread)
        held += [abs(math.log(drawn(n) / measured.tokens_per_second)) <= spread / 2 for _ in range(500)]
    assert len(spreads) == 1, "what passes differ by is the machine's, and all configs tell it together"
    assert 0.85 <= statistics.mean(held) <= 0.95
