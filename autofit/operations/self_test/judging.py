"""From a trial to a verdict: whether it trained, computed the same, and did so at a sensible speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autofit.core.outcome import Crashed, Diverged, Fits, Measurement, Outcome, Trial, Unsupported
from autofit.core.units import format_bytes, format_duration
from autofit.operations.self_test.finding import Finding, Verdict
from autofit.search.correctness import against, first_known
from autofit.trial.measure.divergence import GRADIENT_TOLERANCE, REFERENCE_TOLERANCE, allowed


def unfit(trial: Trial) -> Finding | None:
    """The finding for a trial without a measurement; None for one that fitted."""
    outcome = trial.outcome
    if isinstance(outcome, Fits):
        return None
    verdict = {Unsupported: Verdict.REFUSED, Diverged: Verdict.DIFFERS}.get(type(outcome), Verdict.FAILED)
    return Finding(verdict=verdict, reason=_said(outcome), trials=(trial,))


def _said(outcome: Outcome) -> str:
    assert not isinstance(outcome, Fits)
    if isinstance(outcome, Unsupported):
        return outcome.reason
    lines = outcome.stderr_tail.splitlines()[-3:] if isinstance(outcome, Crashed) else []  # the JSON has all
    return " | ".join([f"{outcome.kind}: {outcome.reason}", *(line.strip() for line in lines if line.strip())])


def same(trial: Trial, plain: Trial, *, updates_alike: bool) -> str | None:
    """How a trial's losses or gradient differ from the plain run's by more than rounding, in words; None if they do
    not, or where an emulated card has computed nothing. Without `updates_alike` only the first step is compared, before
    any update."""
    if trial.hardware.is_emulated:
        return None
    own, expected = trial.measurement, plain.measurement
    assert own is not None and expected is not None
    if updates_alike:
        judged = against(trial, plain).outcome
        return judged.reason if isinstance(judged, Diverged) else None
    gap, tolerance = loss_gap(own, expected), allowed(REFERENCE_TOLERANCE, trial.config)
    if abs(gap) > tolerance:
        return f"the first loss is {gap:+.2%} off plain training's: rounding explains {tolerance:.1%}"
    turn, tolerance = gradient_gap(own, expected), allowed(GRADIENT_TOLERANCE, trial.config)
    if turn is not None and abs(turn) > tolerance:
        return f"the first gradient's norm is {turn:+.2%} off plain training's: rounding explains {tolerance:.1%}"
    return None


def loss_gap(own: Measurement, expected: Measurement) -> float:
    """Relative difference of the first step's loss."""
    return own.losses[0] / expected.losses[0] - 1.0


def gradient_gap(own: Measurement, expected: Measurement) -> float | None:
    """Relative difference of the first gradient's norm; None where loss scaling overflowed throughout."""
    first, known = first_known(own.gradient_norms), first_known(expected.gradient_norms)
    return None if first is None or not known else first / known - 1.0


def tiny_figure(trial: Trial, plain: Trial | None) -> str:
    """A tiny run's step time and, with a plain run, how it compares, unless nothing is computed here."""
    own = trial.measurement
    assert own is not None
    step = own.step_seconds.median
    said = f"step {1000 * step:.1f} ms"
    if plain is None or plain is trial or trial.hardware.is_emulated:
        return said
    expected = plain.measurement
    assert expected is not None
    said += f", {step / expected.step_seconds.median:.1f}x plain; loss {loss_gap(own, expected):+.2%}"
    turn = gradient_gap(own, expected)
    return said if turn is None or plain.config["method"] != trial.config["method"] else f"{said}, gradient {turn:+.2%}"


def size_figure(trial: Trial, predicted: Mapping[str, Any]) -> str:
    """A real run's speed and its memory: seen by the driver, allocated, and predicted."""
    own = trial.measurement
    assert own is not None
    said = f"{own.tokens_per_second:,.0f} tokens/s, driver-seen {format_bytes(own.device_bytes)}"
    if own.peak_allocated_bytes != own.device_bytes:
        said += f", allocated {format_bytes(own.peak_allocated_bytes)}"
    if "error" in predicted:
        return f"{said}, not predicted ({predicted['error']})"
    return f"{said}, predicted {format_bytes(predicted['device_bytes'])} ({memory_gap(own, predicted):+.1%})"


def memory_gap(own: Measurement, predicted: Mapping[str, Any]) -> float:
    """Relative difference of the predicted from the driver-seen memory."""
    return float(predicted["device_bytes"] / own.device_bytes - 1.0)


def cut(seconds: float) -> Finding:
    """The finding for a check that the time limit ended."""
    return Finding(verdict=Verdict.NOT_RUN, reason=f"cut by the time limit after {format_duration(seconds)}")
