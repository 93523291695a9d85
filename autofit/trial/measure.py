"""The measurement: build the step, warm it up, time it phase by phase until the figure is steady."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from autofit.outcome import Diverged, Fits, Measurement, Outcome, StepSeconds
from autofit.training.build import build
from autofit.training.flops import mfu
from autofit.training.step import TrainingStep
from autofit.trial import process_memory
from autofit.trial.meter import Meter, meter_for
from autofit.trial.recording import write_profile
from autofit.trial.repeats import quantile, relative_spread
from autofit.trial.request import TrialRequest

MIN_REPEATS, MAX_REPEATS = 3, 30
STEADY_SPREAD = 0.02
"""Relative spread of step time at which timing ends before its budget is spent."""
WARM_UP_STEPS = 2
"""The first creates states and caches; in the second the host's allocator grows its heap, which took a sixth longer."""
HOPELESS_FACTOR = 1.25
"""A rival that is lighter and faster by this factor after one repeat wins beyond the noise of one repeat."""
LEAK_NOISE_BYTES = 4 * 1024**2
"""Growth per step below this is the allocator's own."""
LEAK_STEPS = 3
"""Growth must be seen this often in a row."""
REFERENCE_TOLERANCE = {"fp32": 1e-3, "default": 2e-2}
"""Relative difference of the first loss from the plain forward's that rounding can explain: bf16 keeps 8 bits."""

Progress = Callable[[str], None]


@dataclass(slots=True)
class _Samples:
    """What the repeats have shown."""

    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    in_use: list[int] = field(default_factory=list)
    stopped_early: bool = False


def run_trial(request: TrialRequest, progress: Progress, *, asked_at: float) -> Outcome:
    """Run the request in this process; `Fits` or `Diverged`. Raises what torch raises, out of memory included.

    `asked_at` is the monotonic time at which the trial was asked for.
    """
    job = request.job
    host_before = process_memory.read().resident
    progress("setup")
    meter = meter_for(job.hardware)
    meter.enforce(request.memory_limit_bytes)
    torch.manual_seed(job.workload.seed)
    progress("build")
    started = time.monotonic()
    step = build(request.config, job, meter.device)
    build_seconds = time.monotonic() - started
    tokens, accumulation = _batch(step, request)
    overhead = time.monotonic() - asked_at - build_seconds
    progress("forward")
    reference = step.reference_loss(tokens[:1]) if job.workload.lora_dropout == 0 else None

    samples = _Samples()
    for _ in range(WARM_UP_STEPS):
        _step(step, tokens, meter, progress, samples, accumulation)
    problem = _divergence(samples.losses, reference, request)
    if problem is not None:
        return problem
    samples.step_seconds.clear()
    setup_seconds = time.monotonic() - asked_at
    _repeat(step, tokens, meter, progress, samples, accumulation, request)
    problem = _divergence(samples.losses, reference, request)
    if problem is not None:
        return problem
    measurement = _measurement(request, meter, samples, reference, host_before, setup_seconds, overhead)
    if request.profile is not None:
        write_profile(request.profile, lambda: step.run(tokens))
    return Fits(measurement=measurement)


def _batch(step: TrainingStep, request: TrialRequest) -> tuple[torch.Tensor, int]:
    """Tokens of at most two micro-batches, and the accumulation steps of the real global batch.

    Two micro-steps show the true peak (the second runs beside the first one's gradients) and the time of each further
    one. All sequences are the same random tokens, so that the mean loss is the same whatever the micro-batch, and
    trials can be held against each other.
    """
    workload = request.job.workload
    accumulation = workload.batch_per_device // step.micro_batch
    generator = torch.Generator().manual_seed(workload.seed)
    row = torch.randint(step.vocabulary, (1, workload.seq_len), generator=generator)
    rows = min(accumulation, 2) * step.micro_batch
    return row.expand(rows, -1).contiguous().to(step.device), accumulation


def _step(
    step: TrainingStep,
    tokens: torch.Tensor,
    meter: Meter,
    progress: Progress,
    samples: _Samples,
    accumulation: int,
) -> None:
    """One optimizer step on at most two micro-batches; its time is composed to the whole accumulation."""

    def observe(phase: str) -> Any:
        progress(phase)
        return meter.phase(phase)

    micro_batches = list(step.split(tokens))
    targets = sum(int((labels >= 0).sum()) for _, labels in micro_batches)
    marks = [meter.mark()]
    losses = []
    for index, (inputs, labels) in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        losses.append(step.micro_step(inputs, labels, targets, last=last, observe=observe))
        marks.append(meter.mark())
    step.update(observe)
    marks.append(meter.mark())
    spans = [meter.seconds(a, b) for a, b in itertools.pairwise(marks)]
    first, further, update = spans[0], spans[-2], spans[-1]
    samples.step_seconds.append(first + (accumulation - 1) * further + update)
    samples.losses.append(float(sum(losses)))
    samples.in_use.append(meter.in_use())


def _repeat(
    step: TrainingStep,
    tokens: torch.Tensor,
    meter: Meter,
    progress: Progress,
    samples: _Samples,
    accumulation: int,
    request: TrialRequest,
) -> None:
    """Timed steps until the spread is small, the budget is spent, or a rival has surely won."""
    started = time.monotonic()
    while len(samples.step_seconds) < MAX_REPEATS:
        _step(step, tokens, meter, progress, samples, accumulation)
        if len(samples.step_seconds) == 1 and _hopeless(request, meter, samples.step_seconds[0]):
            samples.stopped_early = True
            return
        if len(samples.step_seconds) < MIN_REPEATS:
            continue
        spread = relative_spread(samples.step_seconds)
        assert spread is not None, "there are several repeats"
        if spread <= STEADY_SPREAD or time.monotonic() - started > request.timing_seconds:
            return


def _hopeless(request: TrialRequest, meter: Meter, step_seconds: float) -> bool:
    """Whether a measured config is both no heavier and faster beyond the noise of one repeat."""
    speed = request.job.workload.tokens_per_step / step_seconds
    memory = meter.reading().device
    return any(r.device_bytes <= memory and r.tokens_per_second >= HOPELESS_FACTOR * speed for r in request.rivals)


def _divergence(losses: list[float], reference: float | None, request: TrialRequest) -> Diverged | None:
    """The outcome of a loss that is not finite or not the plain forward's; None if all is well."""
    evidence = tuple(x if math.isfinite(x) else None for x in losses)
    if None in evidence:
        return Diverged(
            reason=f"the loss of step {evidence.index(None) + 1} is not finite",
            losses=evidence,
            reference_loss=reference,
        )
    if reference is None:
        return None
    precision = request.config.text("precision")
    tolerance = REFERENCE_TOLERANCE.get(precision, REFERENCE_TOLERANCE["default"])
    if not math.isfinite(reference) or abs(losses[0] - reference) > tolerance * abs(reference):
        return Diverged(
            reason=(
                f"the first loss is {losses[0]:.4f}, the plain forward pass gives {reference:.4f}: more than the "
                f"{tolerance:.1%} that rounding explains"
            ),
            losses=evidence,
            reference_loss=reference if math.isfinite(reference) else None,
        )
    return None


def leak(in_use: list[int]) -> int:
    """Bytes by which memory grew at every step, from what was in use after each; 0 where it did not always grow."""
    growth = [b - a for a, b in itertools.pairwise(in_use)]
    return min(growth) if len(growth) >= LEAK_STEPS and min(growth) > LEAK_NOISE_BYTES else 0


def _measurement(
    request: TrialRequest,
    meter: Meter,
    samples: _Samples,
    reference: float | None,
    host_before: int,
    setup_seconds: float,
    overhead_seconds: float,
) -> Measurement:
    job = request.job
    memory = meter.reading()
    median = quantile(samples.step_seconds, 0.5)
    speed = job.workload.tokens_per_step / median
    return Measurement(
        tokens_per_second=speed,
        step_seconds=StepSeconds(
            median=median,
            p95=quantile(samples.step_seconds, 0.95),
            relative_spread=relative_spread(samples.step_seconds),
        ),
        mfu=mfu(job, request.config, speed),
        peak_allocated_bytes=memory.peak_allocated,
        peak_reserved_bytes=memory.peak_reserved,
        device_bytes=memory.device,
        host_peak_bytes=memory.host_peak,
        host_baseline_bytes=host_before,
        phase_peaks=memory.phase_peaks,
        losses=tuple(samples.losses),
        reference_loss=reference,
        steps=len(samples.step_seconds),
        setup_seconds=setup_seconds,
        overhead_seconds=overhead_seconds,
        leak_bytes_per_step=leak(samples.in_use),
        expandable_segments=job.hardware.kind == "cuda",
        stopped_early=samples.stopped_early,
    )
