"""The checks of techniques: each value of every axis once, on a tiny model, against the plain recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from autofit.catalog.space import ADAPTER_AXES
from autofit.core.errors import spelled
from autofit.core.lattice import Axis, Config, Value
from autofit.core.outcome import Diverged, Measurement, Trial
from autofit.core.workload import Effect
from autofit.operations.self_test.device_under_test import TINY_BATCH, DeviceUnderTest
from autofit.operations.self_test.finding import Check, Finding, Verdict, unfit
from autofit.search.correctness import against, first_known
from autofit.techniques import AXES, AXIS, complete
from autofit.trial.measure.divergence import GRADIENT_TOLERANCE, REFERENCE_TOLERANCE, allowed

EXTENT: dict[str, tuple[Value, ...]] = {"rank": (256,), "micro_batch": (2, TINY_BATCH)}
"""Values to try on axes that list none: any number is valid there."""
COMPANIONS: dict[Value, dict[str, Value]] = {
    "efficient": {"precision": "fp32"},
    "save-attention": {"precision": "fp32", "attention": "efficient"},
}
"""With which a GPU tries a value that the plain recipe of some or all GPUs refuses, or for which it keeps nothing.
Heads that share keys have no fused kernel in fp32 on any GPU, and none in fp16 on a T4."""
EVERYWHERE: dict[Value, dict[str, Value]] = {"in-backward": {"micro_batch": TINY_BATCH}}
"""Settings with which any device tries a value that the plain recipe refuses."""


def precisions() -> Iterator[Check]:
    """fp32 first: other formats are judged against it."""
    axis = AXIS["precision"]
    for value in ("fp32", *(v for v in axis.values if v != "fp32")):
        # The first trial of all waits for the fork server's imports.
        yield _check(axis, value, _precision, most_seconds=120.0 if value == "fp32" else 45.0)


def methods() -> Iterator[Check]:
    """Adapters; the plain recipe is full fine-tuning."""
    for value in ("lora", "qlora"):
        yield _check(AXIS["method"], value, _value)


def others() -> Iterator[Check]:
    """Every other axis of one device, without compilation, and without batching: a check's sequences are all full."""
    for axis in AXES:
        if axis.name not in ("precision", "method", "compile", "sharding", "batching"):
            for value in axis.values or EXTENT[axis.name]:
                if value != axis.recipe:
                    yield _check(axis, value, _value)


def slow_ones() -> Iterator[Check]:
    """Compilation, and what needs several processes."""
    yield _check(AXIS["compile"], True, _value, most_seconds=180.0)
    # Against ddp, the plainest of them, as ranks see tokens of their own.
    for value in ("ddp", *(v for v in AXIS["sharding"].values if v not in ("ddp", "none"))):
        yield _check(AXIS["sharding"], value, _sharding, most_seconds=90.0)


def _check(
    axis: Axis, value: Value, run: Callable[[Axis, Value, DeviceUnderTest, float], Finding], **times: float
) -> Check:
    written = f"{axis.name}={spelled(value)}"
    return Check(
        name=written,
        shows=f"Whether {written} trains the tiny model as the plain recipe does.",
        run=partial(run, axis, value),
        technique=True,
        **times,
    )


def _precision(axis: Axis, value: Value, tested: DeviceUnderTest, until: float) -> Finding:
    finding = _against(tested, complete({axis.name: value}), tested.fitted("precision=fp32"), None, until)
    emulated = tested.emulation(str(value)) if finding.verdict is Verdict.WORKS else None
    return replace(finding, verdict=Verdict.EMULATED, reason=emulated) if emulated else finding


def _value(axis: Axis, value: Value, tested: DeviceUnderTest, until: float) -> Finding:
    base = complete({**dict(tested.plain.items), "method": "lora"}) if axis.name in ADAPTER_AXES else tested.plain
    base = base.replace(**EVERYWHERE.get(value, {}))
    if tested.hardware.kind == "cuda":
        base = base.replace(**COMPANIONS.get(value, {}))
    config = complete({**dict(base.items), axis.name: value})
    return _against(tested, config, tested.fitted(f"precision={base['precision']}"), axis.effect(value), until)


def _sharding(axis: Axis, value: Value, tested: DeviceUnderTest, until: float) -> Finding:
    if tested.ranks < 2:
        return Finding(verdict=Verdict.NOT_RUN, reason="one device: --devices 2 runs it on two")
    config = tested.plain.replace(**{axis.name: value})
    return _against(tested, config, tested.fitted("sharding=ddp"), Effect.EXACT, until, tested.ranks)


def _against(
    tested: DeviceUnderTest, config: Config, plain: Trial | None, effect: Effect | None, until: float, devices: int = 1
) -> Finding:
    """The finding of `config`, compared with the plain run as far as its `effect` allows; not at all without one."""
    job = tested.job(devices=devices)
    trial = tested.trial(job, config, until=until)
    if refused := unfit(trial):
        return refused
    predicted = tested.predicted(job, config, until=until)
    # Other methods train other parameters; what they compute is checked within their own trial, as is what has no
    # plain run to be compared with.
    reason = None
    if plain is not None and effect is not None and trial.config["method"] == plain.config["method"]:
        reason = same(trial, plain, updates_alike=effect is Effect.EXACT)
    return Finding(
        verdict=Verdict.WORKS if reason is None else Verdict.DIFFERS,
        figure=tiny_figure(trial, plain),
        reason=reason or "",
        trials=(trial,),
        predicted=predicted,
    )


def same(trial: Trial, plain: Trial, *, updates_alike: bool) -> str | None:
    """How a trial's losses or gradient differ from the plain run's by more than rounding; None if they do not, or if an
    emulated card has computed nothing. Without `updates_alike` only the first step is compared."""
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
