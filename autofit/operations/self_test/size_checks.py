"""The checks at a real size: each method on a catalog model, its memory as predicted, and the memory limit enforced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from autofit.core.lattice import Config
from autofit.core.outcome import Fits, OutOfMemory, TimedOut, Trial
from autofit.core.units import MIB, format_bytes
from autofit.core.workload import METHODS
from autofit.estimate.memory.lower_bound import floor_bytes
from autofit.operations.self_test.device_under_test import DeviceUnderTest
from autofit.operations.self_test.finding import Check, Finding, Verdict, no_estimate, unfit
from autofit.planning.requests import WorkloadOptions
from autofit.techniques import Job, complete, unsupported

LADDER = ("llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b", "smollm2-360m", "smollm2-135m")
"""Catalog models of one architecture, largest first; on a GPU each method takes the first that fits."""
ON_PROCESSOR, PROCESSOR_TOKENS, GPU_TOKENS = "smollm2-135m", 128, 2048
"""The model and sequence length on a processor, and the length on a GPU."""
ROOM = 0.85
"""Share of the limit that a model may be predicted to take: the self-test shows what works, not what just fits."""
HANGING_PHASES = (None, "start", "setup", "meet")
"""Phases that take no device long: a trial that times out in one of them hangs."""
BELOW, ABOVE = 0.8, 1.15
"""Limits as multiples of what a config needs: by more than caches can give back, and than runs differ."""
SLACK_BYTES = 128 * MIB
"""Added above: of a processor's memory a limit counts what is mapped, and a measurement what was touched."""


def methods() -> Iterator[Check]:
    """Each method, the most faithful first."""
    for method in METHODS:
        yield Check(
            name=f"{method} at a real size",
            shows=f"Speed and memory of method={method} on a catalog model: driver-seen, allocated and predicted.",
            run=partial(_method, method),
            most_seconds=90.0,
        )


def _method(method: str, tested: DeviceUnderTest, until: float) -> Finding:
    config = complete({"method": method, "precision": tested.plain["precision"]})
    largest = _largest(tested, config, until)
    if isinstance(largest, Finding):
        return largest
    job, predicted = largest
    trial = tested.trial(job, config, until=until)
    if "error" in predicted and isinstance(trial.outcome, OutOfMemory):  # the model was a guess
        reason = f"{job.model.name} is too large here, and was not predicted: {predicted['error']}"
        return Finding(verdict=Verdict.NOT_RUN, reason=reason, trials=(trial,))
    if refused := _too_slow(trial) or unfit(trial):
        return refused
    return Finding(
        verdict=Verdict.FAILED if predicted.get("defect") else Verdict.WORKS,
        figure=f"{job.model.name}, {config['precision']}: {_figure(trial, predicted)}",
        reason=no_estimate(predicted) if predicted.get("defect") else "",
        trials=(trial,),
        predicted=predicted,
    )


def _too_slow(*trials: Trial) -> Finding | None:
    """The finding if the last trial was cut while it trained; one that has not begun by then hangs."""
    outcome = trials[-1].outcome
    if not isinstance(outcome, TimedOut) or outcome.phase in HANGING_PHASES:
        return None
    return Finding(verdict=Verdict.NOT_RUN, reason=f"too slow here: {outcome.reason}", trials=trials)


def _largest(tested: DeviceUnderTest, config: Config, until: float) -> tuple[Job, dict[str, Any]] | Finding:
    """The job with the largest model that has room, and its estimate."""
    if tested.hardware.kind == "cpu":
        job = _job(tested, ON_PROCESSOR, PROCESSOR_TOKENS)
        if reason := unsupported(config, job):
            return Finding(verdict=Verdict.REFUSED, reason=reason)
        return job, tested.predicted(job, config, until=until)
    reason = None
    for name in LADDER:
        job = _job(tested, name, GPU_TOKENS)
        reason = unsupported(config, job)
        if reason is not None or floor_bytes(config, job) > ROOM * tested.limit:
            continue
        predicted = tested.predicted(job, config, until=until)
        # Without an estimate, weights and states alone must leave half of the device to the activations.
        needed = predicted.get("device_bytes", 2 * floor_bytes(config, job))
        if needed <= ROOM * tested.limit:
            return job, predicted
    if reason is not None:
        return Finding(verdict=Verdict.REFUSED, reason=reason)
    return Finding(verdict=Verdict.NOT_RUN, reason=f"not even {LADDER[-1]} has room in {format_bytes(tested.limit)}")


def _job(tested: DeviceUnderTest, model: str, tokens: int) -> Job:
    # Two sequences, one at a time: the second meets the first one's gradients.
    return WorkloadOptions(model=model, seq_len=tokens, global_batch=2).job((tested.hardware, tested.stack))


def _limits(tested: DeviceUnderTest, until: float) -> Finding:
    fitted = next(filter(None, (tested.fitted(check.name) for check in methods())), None)
    if fitted is None or fitted.measurement is None:
        return Finding(verdict=Verdict.NOT_RUN, reason="no config at a real size fitted, whose need could be cut")
    need = fitted.measurement.device_bytes
    job = tested.jobs[fitted.workload.key]
    low, high = int(BELOW * need), min(int(ABOVE * need) + SLACK_BYTES, tested.limit)
    below = tested.trial(job, fitted.config, until=until, limit=low)
    above = tested.trial(job, fitted.config, until=until, limit=high)
    figure = (
        f"{fitted.workload.model} {fitted.config['method']} needs {format_bytes(need)}: {below.outcome.kind} under "
        f"{format_bytes(low)}, {above.outcome.kind} under {format_bytes(high)}"
    )
    trials = (below, above)
    if slow := _too_slow(*trials):
        return slow
    if isinstance(below.outcome, OutOfMemory) and isinstance(above.outcome, Fits):
        return Finding(verdict=Verdict.WORKS, figure=figure, trials=trials)
    reasons = [f"{t.outcome.kind}: {t.outcome.reason}" for t in trials if not isinstance(t.outcome, Fits)]
    return Finding(verdict=Verdict.FAILED, figure=figure, reason=" | ".join(reasons), trials=trials)


def _figure(trial: Trial, predicted: Mapping[str, Any]) -> str:
    """A real run's speed and its memory: seen by the driver, allocated, and predicted."""
    measured = trial.measurement
    assert measured is not None
    figure = f"{measured.tokens_per_second:,.0f} tokens/s, driver-seen {format_bytes(measured.device_bytes)}"
    if measured.peak_allocated_bytes != measured.device_bytes:
        figure += f", allocated {format_bytes(measured.peak_allocated_bytes)}"
    if "error" in predicted:
        return f"{figure}, not predicted ({predicted['error']})"
    gap = predicted["device_bytes"] / measured.device_bytes - 1.0
    return f"{figure}, predicted {format_bytes(predicted['device_bytes'])} ({gap:+.1%})"


LIMITS = Check(
    name="memory limit",
    shows="Whether a config runs out of memory under a limit below what it needs, and fits under one above.",
    run=_limits,
    most_seconds=120.0,
)
"""With what an earlier check measured."""
