"""The time model: a roofline, fitted to a few measured trials."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autofit.estimate.amounts import MICRO_BATCH, RANK
from autofit.estimate.speed import Rates, calibrated, guess, seconds, step_work
from autofit.estimate.work import Work, Works
from autofit.outcome import StepWork

PRIOR = guess(flops=1e15, wide_flops=1e14, bandwidth=3e12)


def test_an_operation_counts_by_what_bounds_it() -> None:
    product = Work(flops=10**12, moved=(10**5, 9 * 10**5), wide=False)
    wide = Work(flops=10**12, moved=(10**6,), wide=True)
    copy = Work(flops=0, moved=(10**9,), wide=False)
    thin = Work(flops=10**6, moved=(10**8, 9 * 10**8), wide=False)
    works = [Works.of([product], times=3), Works.of([wide]), Works.of([copy], times=2), Works.of([thin])]
    found = step_work([part.at(1, 1) for part in works], PRIOR, moved_bytes=5)
    assert found == StepWork(flops=3e12, wide_flops=1e12, bytes=3e9, operations=7, moved_bytes=5)
    assert step_work([Works.joined(works).at(1, 1)], PRIOR, moved_bytes=5) == found


def test_costs_grow_with_what_they_are_proportional_to() -> None:
    of_both = Work(flops=6 * MICRO_BATCH * RANK, moved=(4 * MICRO_BATCH, 8 * RANK, 16), wide=False)
    found = Works.of([of_both]).at(3, 5)
    assert (found.flops.tolist(), found.bytes.tolist()) == ([6 * 3 * 5], [4 * 3 + 8 * 5 + 16])
    assert found.repeated(7).times.tolist() == [7.0]


def test_an_accelerator_hides_the_host_and_a_processor_does_not() -> None:
    found = StepWork(flops=1e12, wide_flops=0.0, bytes=1e9, operations=100.0, moved_bytes=0.0)
    device = 1e12 * PRIOR.per_flop + 1e9 * PRIOR.per_byte
    host = 100 * PRIOR.per_operation
    assert seconds(found, PRIOR, overlapping_host=True) == pytest.approx(max(device, host))
    assert seconds(found, PRIOR, overlapping_host=False) == pytest.approx(device + host)


def test_without_trials_the_guess_stands_and_says_so() -> None:
    assert calibrated(PRIOR, []) is PRIOR
    assert PRIOR.calibrated_on == 0 and PRIOR.relative_error == 0.5


def test_a_few_trials_find_a_device_that_is_not_as_its_data_sheet() -> None:
    draw = random.Random(0)
    true = Rates(
        per_flop=2.5 * PRIOR.per_flop,
        per_wide_flop=1.5 * PRIOR.per_wide_flop,
        per_byte=0.8 * PRIOR.per_byte,
        per_operation=2 * PRIOR.per_operation,
    )

    def step() -> StepWork:
        return StepWork(
            flops=draw.uniform(1, 20) * 1e13,
            wide_flops=draw.uniform(0, 2) * 1e12,
            bytes=draw.uniform(1, 9) * 1e10,
            operations=draw.uniform(1, 9) * 1e3,
            moved_bytes=0.0,
        )

    def taken(found: StepWork) -> float:
        return seconds(found, true, overlapping_host=False)

    fitted = calibrated(PRIOR, [(found, taken(found)) for found in (step() for _ in range(5))])
    assert fitted.calibrated_on == 5
    errors = [abs(seconds(f, fitted, overlapping_host=False) / taken(f) - 1) for f in (step() for _ in range(50))]
    assert float(np.median(errors)) < 0.15
    before = [abs(seconds(f, PRIOR, overlapping_host=False) / taken(f) - 1) for f in (step() for _ in range(50))]
    assert float(np.median(errors)) < float(np.median(before)) / 2
