"""Which configs are trained on an emulated card so that every pair of values is."""

from __future__ import annotations

import itertools
from dataclasses import replace

import draw_emulated
import pytest

from autofit.prediction.estimation import site
from autofit.techniques import unsupported


def test_a_pair_is_trained_unless_the_card_refuses_it() -> None:
    """In the words that are said of the catalog's card."""
    card, stack = site("t4")
    job = draw_emulated.PAIRED.job((replace(card, name="emulated-t4"), replace(stack, flash_attn=None)))
    configs, refused = draw_emulated.every_pair(job, 0)
    trained = {frozenset(two) for config in configs for two in itertools.combinations(config.items, 2)}
    assert not any(unsupported(config, job) for config in configs)
    for optimizer, compiled in itertools.product(("sgd", "adamw-8bit", "lion"), (True, False)):
        assert {("optimizer", optimizer), ("compile", compiled)} in trained
    assert {("rank", 64), ("loss", "fused")} in trained
    assert refused["precision=bf16 is only emulated on emulated-t4: use fp16-mixed"] > 40
    other = replace(job.hardware, name="emulated-h100-80g")
    with pytest.raises(ValueError, match="is refused otherwise: 'precision=bf16 is only emulated"):
        draw_emulated.every_pair(replace(job, hardware=other), 0)
