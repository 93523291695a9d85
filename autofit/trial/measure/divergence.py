"""Whether a trial trained correctly: its losses and gradients, checked against the plain forward and one another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from autofit.core.lattice import Config
from autofit.core.outcome import Diverged
from autofit.techniques.axes.optimizer import kind_of

REFERENCE_TOLERANCE = {"fp32": 1e-5, "default": 2e-3}
"""Relative difference between the first loss and the plain forward's that rounding explains: several times what the
techniques' tests see, which is 1e-6 in fp32 and 1e-3 in bf16."""
GRADIENT_TOLERANCE = {"fp32": 5e-3, "default": 5e-2}
"""Relative difference of a gradient's norm that rounding explains, at the same weights."""
RANKS_TOLERANCE = {"bf16": 2.0**-7, "default": 1e-5}
"""Relative difference between the ranks' gradient norms that rounding explains: all have the same gradients once these
are synchronised, so only processors of different kinds may round the norm differently, in the gradients' format."""


def divergence(
    config: Config,
    losses: Sequence[float],
    gradient_norms: Sequence[float],
    reference: float | None,
    *,
    norm_spreads: Sequence[float] = (),
    latest_norm: float | None = None,
    later: Iterable[Sequence[float]] = (),
    dropout: bool = False,
) -> Diverged | None:
    """The outcome for a loss or gradient that sound training would not give; None if all is well.

    `losses` and `gradient_norms` are those of every step so far; `reference` is the plain forward's loss on the first
    step's batch. Where others follow on sequences of other lengths, `latest_norm` is the last one's, and `later` are
    their losses, each row those of one length. `norm_spreads` says for every step how far apart the norms of several
    ranks lie, relative to the largest. `dropout` says that the architecture has dropout of its own, so that the loss on
    one batch fluctuates.
    """
    updated = [x for x, norm in zip(losses, gradient_norms, strict=True) if math.isfinite(norm)]
    for reason in (
        not_finite(config, losses, gradient_norms if latest_norm is None else [*gradient_norms, latest_norm]),
        _not_the_plain_loss(config, losses[0], reference),
        _not_synchronised(config, norm_spreads),
        *(None if dropout else _not_falling(config, row) for row in (updated, *later)),
    ):
        if reason is not None:
            return Diverged(
                reason=reason,
                losses=tuple(x if math.isfinite(x) else None for x in losses),
                reference_loss=reference if reference is not None and math.isfinite(reference) else None,
            )
    return None


def allowed(tolerances: Mapping[str, float], config: Config) -> float:
    """The tolerance in the config's precision."""
    return tolerances.get(config.text("precision"), tolerances["default"])


def other_gradient(config: Config, losses: Sequence[float], norm: float, plain: float) -> Diverged | None:
    """The outcome if the gradient's `norm` differs from that of plain training by more than rounding."""
    tolerance = allowed(GRADIENT_TOLERANCE, config)
    if abs(norm - plain) <= tolerance * plain:
        return None
    return Diverged(
        reason=f"the gradient's norm is {norm:.4g}, that of plain training {plain:.4g}: more than the {tolerance:.1%} "
        "that rounding explains",
        losses=tuple(losses),
        reference_loss=None,
    )


def not_finite(config: Config, losses: Sequence[float], gradient_norms: Sequence[float]) -> str | None:
    """What is not a number, or gradients that are nothing, in one sentence; None if all is well."""
    for step, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            return f"the loss of step {step} is not finite"
    # Loss scaling overflows on purpose, to find the largest scale that does not; the last step must be sound.
    watched = gradient_norms[-1:] if config["precision"] == "fp16-mixed" else gradient_norms
    if not all(math.isfinite(norm) for norm in watched):
        return f"the gradient of step {len(losses)} is not finite"
    if gradient_norms and not any(gradient_norms):
        return "the gradients are all zero"
    return None


def _not_the_plain_loss(config: Config, loss: float, reference: float | None) -> str | None:
    if reference is None:
        return None
    tolerance = allowed(REFERENCE_TOLERANCE, config)
    if math.isfinite(reference) and abs(loss - reference) <= tolerance * abs(reference):
        return None
    return (
        f"the first loss is {loss:.5f}, the plain forward pass gives {reference:.5f}: more than the "
        f"{tolerance:.2%} that rounding explains"
    )


def _not_synchronised(config: Config, norm_spreads: Sequence[float]) -> str | None:
    """Each rank trains on a sequence of its own: norms that differ are those of gradients that were not exchanged."""
    tolerance = allowed(RANKS_TOLERANCE, config)
    for step, spread in enumerate(norm_spreads, start=1):
        if not spread <= tolerance:
            return (
                f"the ranks' gradients were not synchronised: in step {step} their norms differ by {spread:.2g} of the "
                f"largest, more than the {tolerance:.2g} that rounding explains"
            )
    return None


def _not_falling(config: Config, losses: Sequence[float]) -> str | None:
    """Every trial repeats one batch, so gradients of the right sign and updates that happen lower its loss within four.

    `losses` are those of the steps that updated the weights: loss scaling skips the others.
    """
    if len(losses) <= 4 or not kind_of(config).lowers_losses:
        return None
    if min(losses[4:]) < losses[0]:
        return None
    return f"{len(losses) - 1} updates on one batch did not lower its loss of {losses[0]:.5f}"
