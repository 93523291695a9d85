"""Whether exact techniques trained exactly: a trial's losses against those of a config that differs in nothing else."""

from __future__ import annotations

from dataclasses import replace

from autofit.lattice import Config
from autofit.outcome import Diverged, Fits, Measurement, Trial
from autofit.techniques import family

LOSS_TOLERANCE = {"fp32": 2e-3, "default": 2e-2}
"""Relative difference of a step's loss that rounding explains after a few updates. Adam's first steps go by the sign
of each gradient, which rounding flips where a gradient is near zero: hence more than one step's rounding."""


class FamilyLosses:
    """The losses that each family of configs has shown. Trials of a family see the same tokens and weights."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[Config, Measurement]] = {}

    def checked(self, trial: Trial) -> Trial:
        """`trial`, with outcome `Diverged` if its losses are not those of its family; the first one sets them."""
        if not isinstance(trial.outcome, Fits) or trial.workload.lora_dropout > 0:
            return trial
        measurement = trial.outcome.measurement
        config, known = self._first.setdefault(family(trial.config), (trial.config, measurement))
        tolerance = LOSS_TOLERANCE.get(trial.config.text("precision"), LOSS_TOLERANCE["default"])
        for step, (own, expected) in enumerate(zip(measurement.losses, known.losses, strict=False), start=1):
            if abs(own - expected) > tolerance * abs(expected):
                reason = (
                    f"the loss of step {step} is {own:.4f}, and {expected:.4f} with {config}, which differs only in "
                    f"exact techniques: more than the {tolerance:.1%} that rounding explains"
                )
                outcome = Diverged(reason=reason, losses=measurement.losses, reference_loss=expected)
                return replace(trial, outcome=outcome)
        return trial
