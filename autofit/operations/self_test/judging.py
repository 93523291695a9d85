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
    return Finding(verdict=verdict, reason=_reason(outcome), trials=(trial,))


def _reason(outcome: Outcome) -> str:
    assert not isinstance(outcome, Fits)
    if isinstance(outcome, Unsupported):
        return outcome.reason
    lines = outcome.stderr_tail.splitlines()[-3:] if isinstance(outcome, Crashed) else []  # the JSON has all
    return " | ".join([f"{outcome.kind}: {outcome.reason}", *(line.strip() for line in lines if line.strip())])


def same(trial: Trial, plain: Trial, *, updates_alike: bool) -> str | None:
    """How a trial's losses or gradient differ from the plain run's by more than rounding, in words. None if they do
    not, or if an emulated card has computed nothing. Without `updates_alike` only the first step, before any update, is
    compared."""
    if trial.hardware.is_emulated:
        return None
    measured, expected = trial.measurement, plain.measurement
    assert measured is not None and expected is not None
    if updates_alike:
        outcome = against(trial, plain).outcome
        return outcome.reason if isinstance(outcome, Diverged) else None
    gap, tolerance = loss_gap(measured, expected), allowed(REFERENCE_TOLERANCE, trial.config)
    if abs(gap) > tolerance:
        return f"the first loss is {gap:+.2%} off plain training's: rounding explains {tolerance:.1%}"
    norm_gap, tolerance = gradient_gap(measured, expected), allowed(GRADIENT_TOLERANCE, trial.config)
    if norm_gap is not None and abs(norm_gap) > tolerance:
        return f"the first gradient's norm is {norm_gap:+.2%} off plain training's: rounding explains {tolerance:.1%}"
    return None


def loss_gap(measured: Measurement, expected: Measurement) -> float:
    """Relative difference of the first step's loss."""
    return measured.losses[0] / expected.losses[0] - 1.0


def gradient_gap(measured: Measurement, expected: Measurement) -> float | None:
    """Relative difference of the first gradient's norm; None where loss scaling overflowed throughout."""
    norm, expected_norm = first_known(measured.gradient_norms), first_known(expected.gradient_norms)
    return None if norm is None or not expected_norm else norm / expected_norm - 1.0


def tiny_figure(trial: Trial, plain: Trial | None) -> str:
    """A tiny run's step time; with a plain run also how the two compare, unless the card computes nothing."""
    measured = trial.measurement
    assert measured is not None
    step = measured.step_seconds.median
    figure = f"step {1000 * step:.1f} ms"
    if plain is None or plain is trial or trial.hardware.is_emulated:
        return figure
    expected = plain.measurement
    assert expected is not None
    figure += f", {step / expected.step_seconds.median:.1f}x plain; loss {loss_gap(measured, expected):+.2%}"
    norm_gap = gradient_gap(measured, expected)
    if norm_gap is None or plain.config["method"] != trial.config["method"]:
        return figure
    return f"{figure}, gradient {norm_gap:+.2%}"


def size_figure(trial: Trial, predicted: Mapping[str, Any]) -> str:
    """A real run's speed and its memory: seen by the driver, allocated, and predicted."""
    measured = trial.measurement
    assert measured is not None
    figure = f"{measured.tokens_per_second:,.0f} tokens/s, driver-seen {format_bytes(measured.device_bytes)}"
    if measured.peak_allocated_bytes != measured.device_bytes:
        figure += f", allocated {format_bytes(measured.peak_allocated_bytes)}"
    if "error" in predicted:
        return f"{figure}, not predicted ({predicted['error']})"
    return f"{figure}, predicted {format_bytes(predicted['device_bytes'])} ({memory_gap(measured, predicted):+.1%})"


def memory_gap(measured: Measurement, predicted: Mapping[str, Any]) -> float:
    """Relative difference of the predicted from the driver-seen memory."""
    return float(predicted["device_bytes"] / measured.device_bytes - 1.0)


def cut(seconds: float) -> Finding:
    """The finding for a check that the time limit ended."""
    return Finding(verdict=Verdict.NOT_RUN, reason=f"cut by the time limit after {format_duration(seconds)}")
