"""The checks of techniques: each value of every axis once, on a tiny model, against the plain recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from autofit.catalog.space import ADAPTER_AXES
from autofit.core.errors import spelled
from autofit.core.lattice import Axis, Config, Value
from autofit.core.outcome import Diverged, Trial
from autofit.core.workload import Effect
from autofit.operations.self_test.device_under_test import TINY_BATCH, DeviceUnderTest
from autofit.operations.self_test.finding import Check, Finding, Verdict, no_estimate, unfit
from autofit.search.correctness import against
from autofit.techniques import AXES, AXIS, complete

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
    """The finding of `config`, compared with the plain run if that has trained the same, by its `effect` and method."""
    job = tested.job(devices=devices)
    trial = tested.trial(job, config, until=until)
    if refused := unfit(trial):
        return refused
    predicted = tested.predicted(job, config, until=until)
    # Every trial compares its own first loss and gradient with plain training's; what is exact must also go on so.
    judged, computes = trial, not trial.hardware.is_emulated
    if computes and plain and effect is Effect.EXACT and trial.config["method"] == plain.config["method"]:
        judged = against(trial, plain)
    verdict, reason = Verdict.WORKS, ""
    if isinstance(judged.outcome, Diverged):
        verdict, reason = Verdict.DIFFERS, judged.outcome.reason
    elif predicted.get("defect"):
        verdict, reason = Verdict.FAILED, no_estimate(predicted)
    return Finding(
        verdict=verdict,
        figure=tiny_figure(trial, plain),
        reason=reason,
        trials=(trial,),
        predicted=predicted,
    )


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
    return f"{figure}, {step / expected.step_seconds.median:.1f}x plain"
