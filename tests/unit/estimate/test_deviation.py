"""How sure a predicted fit is, given how far predictions were off before."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from unit.operations.test_estimate_cache import FOOTPRINT, JOB

from autofit.estimate.estimate import Estimate
from autofit.estimate.memory.deviation import MemoryDeviation

NOTHING_SHOWN = MemoryDeviation(mean=0.0, deviation=0.1, compared_on=0)


@pytest.mark.parametrize(
    ("times", "mean", "sure"),
    [
        (1.30, 0.0, "sure"),
        (1.15, 0.0, "likely"),
        (1.05, 0.0, "unsure"),
        (1.0, 0.0, "unsure"),
        (0.95, 0.0, "unsure"),
        (0.85, 0.0, "likely"),
        (0.70, 0.0, "sure"),
        (1.15, 0.2, "unsure"),  # it fits only if the trials so far were exceptions
        (0.95, 0.2, "sure"),
    ],
)
def test_what_is_clear_of_the_limit_is_sure(times: float, mean: float, sure: str) -> None:
    shown = replace(NOTHING_SHOWN, mean=mean)
    assert shown.certainty(10**9, int(times * 10**9)) == sure


def test_an_estimate_is_as_sure_as_the_trials_of_its_method() -> None:
    assert Estimate.of(FOOTPRINT, JOB).certainty is None
    close = replace(FOOTPRINT, memory_limit_bytes=int(1.03 * FOOTPRINT.device_bytes))
    shown = {"qlora": replace(NOTHING_SHOWN, deviation=0.01, compared_on=9), "lora": NOTHING_SHOWN}
    judged = Estimate.of(close, JOB, None, shown)
    assert judged.certainty == "sure" and judged.fits
    document = judged.to_json()
    assert document["memory_deviation"] == {"mean": 0.0, "deviation": 0.01, "compared_on": 9}
    assert document["certainty"] == judged.short_json()["certainty"] == "sure"
    assert Estimate.of(close, JOB, None, {**shown, "qlora": NOTHING_SHOWN}).certainty == "unsure"


def test_trials_of_traced_steps_make_no_formula_sure() -> None:
    by_formula = replace(FOOTPRINT, untraced="it cannot be followed")
    shown = {"qlora": replace(NOTHING_SHOWN, deviation=0.01, compared_on=9)}
    for times, fits, sure in ((1.4, False, "unsure"), (1.6, True, "likely"), (2.4, True, "sure")):
        limited = replace(by_formula, memory_limit_bytes=int(times * by_formula.device_bytes))
        found = Estimate.of(limited, JOB, None, shown)
        assert (found.fits, found.certainty) == (fits, sure)
    assert found.memory_deviation == MemoryDeviation(mean=0.0, deviation=math.log(1.5), compared_on=0)
