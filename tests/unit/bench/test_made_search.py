"""Our search on made devices: the figures that it must reach although what it believes of them is wrong."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from unit.bench.honest import problems

from autofit.bench.made_device import MadeDevice
from autofit.bench.made_search import BUDGET_SECONDS, OURS, practical, searched
from autofit.outcome import Fits, Trial
from autofit.search.replay.recorded import Recorded

SEEDS = 10
BF16 = "precision=bf16:30,precision=bf16-mixed:12"


@pytest.mark.parametrize(
    ("name", "method"),
    [
        (BF16, "full"),
        (BF16, "lora"),
        (BF16, "any"),
        ("checkpointing=none+precision=bf16:10", "full"),
        ("checkpointing=none+precision=bf16:10", "lora"),
        ("drift:4", "lora"),
        ("noise:0.15", "full"),
    ],
)
def test_the_recommendation_and_its_bound_survive_a_wrong_belief(name: str, method: str) -> None:
    """All but one of ten within 10 % of the best, and no slower than stated; half within 5 %.

    Within 2 % is asked of all devices together (`benchmarks/replay_devices.py`)."""
    device = MadeDevice.of(name)
    found = [searched(problems()[method], device, OURS, seed, BUDGET_SECONDS) for seed in range(SEEDS)]
    regrets = sorted(search.regret for search in found)
    assert statistics.median(regrets) <= 0.05
    assert regrets[SEEDS - 2] <= 0.10
    assert sum(search.bound_holds is True for search in found) >= SEEDS - 1


def test_only_a_method_of_practical_speed_is_to_be_recommended() -> None:
    """Of the next less faithful one, a fifth of the speed; a fourth less or more of that may count either way."""
    recorded = problems()["any"]
    for factor, methods in ((1.0, {"full"}), (0.21, {"full", "lora"}), (0.19, {"full", "lora"}), (0.1, {"lora"})):
        assert {point.method for point in practical(_with_full_at(recorded, factor))} == methods


def _with_full_at(recorded: Recorded, share: float) -> Recorded:
    """The table with the full fine-tunings at this share of the speed of the fastest LoRA."""
    fastest = (
        recorded.best_of("lora").measurement.tokens_per_second / recorded.best_of("full").measurement.tokens_per_second
    )

    def made(trial: Trial) -> Trial:
        if trial.config["method"] != "full" or not isinstance(trial.outcome, Fits):
            return trial
        measured = trial.outcome.measurement
        speed = share * fastest * measured.tokens_per_second
        return replace(trial, outcome=Fits(measurement=replace(measured, tokens_per_second=speed)))

    return replace(recorded, trials={config: made(trial) for config, trial in recorded.trials.items()})
