"""Layers that are taken away: only meanwhile, and only what is meant."""

from __future__ import annotations

import pytest
from unit.bench.honest import problems

from autofit.bench.ablation import LAYERS
from autofit.bench.made_device import MadeDevice
from autofit.bench.made_search import OURS, searched
from autofit.search import advice, foresight
from autofit.search.adviser import Adviser
from autofit.search.replay import ours

DEVICE = MadeDevice.of("precision=bf16:10,noise:0.15")
OWNERS = (advice, advice.Advice, foresight, Adviser, ours)


@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_a_search_runs_with_and_without_each_layer_and_leaves_no_trace(name: str, present: bool) -> None:
    before = [dict(vars(owner)) for owner in OWNERS]
    with LAYERS[name].applied(DEVICE, present=present):
        assert searched(problems()["lora"], DEVICE, OURS, 0, None, workers=LAYERS[name].workers).trace.stopped
    assert [dict(vars(owner)) for owner in OWNERS] == before


def test_the_study_that_is_told_changes_no_search() -> None:
    def traced(present: bool) -> object:
        with LAYERS["study"].applied(DEVICE, present=present):
            return [searched(problems()[method], DEVICE, OURS, 1, None).trace for method in ("full", "any")]

    assert traced(True) == traced(False)
