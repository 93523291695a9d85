"""What counts as diverged: not finite, not the plain loss, not falling."""

from __future__ import annotations

import math

import pytest

from autofit.techniques import complete, parse
from autofit.trial.measure.divergence import divergence

BF16 = complete(parse("method=full,precision=bf16"))
FP32 = complete(parse("method=full,precision=fp32"))
FP16 = complete(parse("method=full,precision=fp16-mixed"))
SGD = complete(parse("method=full,precision=bf16,optimizer=sgd"))
FALLING = [11.0, 10.99, 10.98, 10.97, 10.96, 10.95]
NORMS = [2.0] * 6


def test_a_falling_loss_near_the_reference_is_well() -> None:
    assert divergence(BF16, FALLING, NORMS, 11.001) is None
    assert divergence(FP32, FALLING, NORMS, 11.00001) is None
    assert divergence(BF16, FALLING, NORMS, None) is None


@pytest.mark.parametrize("config", [BF16, FP32])
def test_the_reference_binds_as_closely_as_rounding_allows(config: object) -> None:
    outcome = divergence(config, FALLING, NORMS, 11.05)  # type: ignore[arg-type]
    assert outcome is not None and "plain forward" in outcome.reason
    assert outcome.reference_loss == 11.05


def test_a_loss_that_is_not_finite_is_named_by_its_step() -> None:
    outcome = divergence(BF16, [11.0, math.nan], [2.0, 2.0], 11.0)
    assert outcome is not None and "loss of step 2" in outcome.reason
    assert outcome.losses == (11.0, None)


def test_gradients_must_be_finite_but_for_the_search_of_the_loss_scale() -> None:
    assert divergence(BF16, [11.0], [math.inf], 11.0) is not None
    assert divergence(FP16, [11.0, 11.0], [math.inf, 2.0], 11.0) is None
    assert divergence(FP16, [11.0, 11.0], [math.inf, math.inf], 11.0) is not None


def test_zero_gradients_are_no_training() -> None:
    outcome = divergence(BF16, [11.0, 11.0], [0.0, 0.0], 11.0)
    assert outcome is not None and "all zero" in outcome.reason


def test_ranks_that_differ_by_more_than_rounding_are_not_synchronised() -> None:
    assert divergence(FP32, [11.0, 10.9], [2.0, 2.0], 11.0, norm_spreads=[0.0, 1e-7]) is None
    assert divergence(BF16, [11.0, 10.9], [2.0, 2.0], 11.0, norm_spreads=[0.0, 2.0**-8]) is None
    for config, spread in ((FP32, 1e-3), (BF16, 0.01), (FP32, math.inf)):
        outcome = divergence(config, [11.0, 10.9], [2.0, 2.0], 11.0, norm_spreads=[0.0, spread])
        assert outcome is not None and "not synchronised: in step 2" in outcome.reason


def test_an_update_that_does_nothing_is_found() -> None:
    flat = [11.0] * 6
    outcome = divergence(BF16, flat, NORMS, 11.0)
    assert outcome is not None and "did not lower" in outcome.reason
    assert divergence(BF16, flat[:4], NORMS[:4], 11.0) is None, "too few to tell"
    assert divergence(SGD, flat, NORMS, 11.0) is None, "lost in 16-bit weights"


def test_with_dropout_the_loss_of_one_batch_goes_up_and_down() -> None:
    assert divergence(BF16, [11.0, 11.1, 11.2, 11.3, 11.4, 11.5], NORMS, None, dropout=True) is None
    assert divergence(BF16, [11.0, math.nan], [2.0, 2.0], None, dropout=True) is not None


def test_an_ascent_is_found() -> None:
    assert divergence(BF16, [11.0, 11.1, 11.2, 11.3, 11.4, 11.5], NORMS, 11.0) is not None
