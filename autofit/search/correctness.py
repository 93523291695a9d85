"""Checks that exact techniques trained exactly: losses and gradient against a config that differs in nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from autofit.core.lattice import Config
from autofit.core.outcome import Diverged, Fits, Measurement, Trial
from autofit.techniques import AXES, family
from autofit.techniques.axes.sharding import rounds_master_weights
from autofit.trial.measure.divergence import GRADIENT_TOLERANCE, allowed

LOSS_TOLERANCE = {"fp32": 2e-3, "default": 2e-2}
"""Relative difference of a step's loss that rounding explains after a few updates. Adam's first steps follow the sign
of each gradient, which rounding flips where a gradient is near zero: hence more than one step's rounding.

Below one nat it is the difference itself. A small loss is the exponential of minus the margin by which the right token
wins, so its relative difference is the absolute one of the logits, which are rounded. Trials repeat one batch, which a
large model knows by heart within five steps. What comes then is not compared: on an H100, losses of 3.7e-5 and 3.8e-5
were both right (benchmarks/recorded/h100)."""


class FamilyBaselines:
    """Compares the trials of each family of configs with each other. They see the same tokens and weights.

    If two trials disagree, the one with more techniques is wrong: techniques claim to be exact, the plain run claims
    nothing. If they have equally many, it is the one with which most other configs disagree; between just two, nothing
    is decided.
    """

    def __init__(self, *, comparable: bool = True) -> None:
        """With dropout every run differs, and an emulated device computes nothing: neither is `comparable`."""
        self._comparable = comparable
        self._families: dict[str, list[Trial]] = {}
        self._refuted: list[Trial] = []

    def checked(self, trial: Trial) -> Trial:
        """`trial`, with outcome `Diverged` if others of its family show that its losses or gradients are wrong."""
        if not self._comparable or not isinstance(trial.outcome, Fits):
            return trial
        family_trials = self._families.setdefault(family(trial.config), [])
        judged = _judged(trial, family_trials)
        if judged is not trial:
            return judged
        for earlier in [t for t in family_trials if techniques(t.config) >= techniques(trial.config)]:
            refuted = _judged(earlier, [*(t for t in family_trials if t is not earlier), trial])
            if refuted is not earlier:
                family_trials.remove(earlier)
                self._refuted.append(refuted)
        family_trials.append(trial)
        return trial

    def take_refuted(self) -> list[Trial]:
        """Earlier trials that later ones have refuted since the last call, now `Diverged`."""
        refuted, self._refuted = self._refuted, []
        return refuted


def _judged(trial: Trial, others: Sequence[Trial]) -> Trial:
    """`trial`, with outcome `Diverged` if all of the plainest `others` disagree with it or, where it is as plain as
    they are, most of them and at least two."""
    witnesses = {other.config: other for other in others if other.config != trial.config}
    count = techniques(trial.config)
    fewest = min([count, *map(techniques, witnesses)])
    verdicts = [against(trial, w) for config, w in witnesses.items() if techniques(config) == fewest]
    refutations = [verdict for verdict in verdicts if verdict is not trial]
    if count > fewest:
        return refutations[0] if len(refutations) == len(verdicts) else trial
    most = len(refutations) > 1 and 2 * len(refutations) > len(verdicts)
    return refutations[0] if most else trial


@cache
def techniques(config: Config) -> int:
    """How many exact techniques a config uses; the micro-batch does not count as one."""
    exact_axes = (axis for axis in AXES if not axis.numeric and axis.exact)
    return sum(config.get(axis.name) not in (None, axis.recipe) for axis in exact_axes)


def against(trial: Trial, baseline: Trial) -> Trial:
    """`trial`, with outcome `Diverged` if it differs from `baseline` by more than rounding.

    Where only one of them rounds its master weights, what follows the first update differs for that reason alone.
    """
    measured, expected = trial.measurement, baseline.measurement
    assert measured is not None and expected is not None
    reason = _other_gradient(measured, expected, allowed(GRADIENT_TOLERANCE, trial.config))
    rounded_alike = rounds_master_weights(trial.config) == rounds_master_weights(baseline.config)
    losses, right = _before_updates(measured), _before_updates(expected)
    steps = len(losses) if rounded_alike else 1
    reason = reason or _other_loss(losses[:steps], right, allowed(LOSS_TOLERANCE, trial.config))
    if reason is None:
        return trial
    outcome = Diverged(
        reason=f"{reason} of {baseline.config}, which differs only in exact techniques",
        losses=measured.losses,
        reference_loss=expected.losses[0],
    )
    return replace(trial, outcome=outcome, trial_id=None)


def _other_gradient(measured: Measurement, expected: Measurement, tolerance: float) -> str | None:
    norm, right = first_known(measured.gradient_norms), first_known(expected.gradient_norms)
    if norm is None or right is None or abs(norm - right) <= tolerance * right:
        return None
    return f"the first gradient's norm is {norm:.4g}, more than {tolerance:.1%} from the {right:.4g}"


def _before_updates(measured: Measurement) -> Sequence[float]:
    """The losses of the steps that changed the weights: loss scaling leaves out the update of a gradient that
    overflows, and two trials may overflow in different steps."""
    overflowed = {step for step, norm in enumerate(measured.gradient_norms) if norm is None}
    return [loss for step, loss in enumerate(measured.losses) if step not in overflowed] or measured.losses


def _other_loss(losses: Sequence[float], expected: Sequence[float], tolerance: float) -> str | None:
    for step, (loss, right) in enumerate(zip(losses, expected, strict=False), start=1):
        if abs(loss - right) > tolerance * max(abs(right), 1.0):
            most = f"{tolerance:.1%}" if abs(right) >= 1.0 else f"{tolerance:g}"
            return f"the loss of step {step} is {loss:.4f}, more than {most} from the {right:.4f}"
    return None


def first_known(norms: Sequence[float | None]) -> float | None:
    """The first gradient that loss scaling did not overflow; the weights are still the initial ones there."""
    return next((norm for norm in norms if norm is not None), None)
