"""The measurement: build the step, check it, warm it up, and time it until the figure is steady."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from autofit.core.outcome import EVALUATION, PHASES, Diverged, Fits, Measurement, Outcome, RankMeasurement
from autofit.techniques import needs_process_group
from autofit.techniques.axes.batching import micro_batches, rows_per_sequence
from autofit.training.build import build
from autofit.training.distributed.ranks import Ranks, join
from autofit.training.flops import mfu
from autofit.training.step import TrainingStep
from autofit.trial.limits.threads import threads_per_rank, use_threads
from autofit.trial.measure import process_memory
from autofit.trial.measure.divergence import divergence, other_gradient
from autofit.trial.measure.leak import leak, may_leak
from autofit.trial.measure.meter import MemoryReading, Meter, meter_for
from autofit.trial.measure.pace import Mixed, Pace, is_brief, least_repeats, micro_steps_run, warm_ups
from autofit.trial.measure.recording import memory_snapshot, write_profile
from autofit.trial.measure.repeats import MOST_REPEATS, is_settled, step_seconds
from autofit.trial.measure.steps import Progress, Steps, Tell, Watch
from autofit.trial.process.classify import memory_failure
from autofit.trial.request import TrialRequest

if TYPE_CHECKING:
    from autofit.trial.process.child import EventPipe

COMPARED_TOKENS = 512
"""Of a sequence on which gradients are compared where a micro-step takes long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A trial that has run."""

    outcome: Outcome
    record: Callable[[], None] | None = None
    """Makes the recordings that the request asks for; None if there are none to make."""
    ranks: Ranks | None = None
    """The group to leave once nothing is left to do."""


def run_trial(request: TrialRequest, events: EventPipe, *, asked_at: float, listener: int | None = None) -> Ended:
    """Run the request in this process: `Fits` or `Diverged`. Raises what torch raises, out of memory included, and
    `NoMeeting`.

    `asked_at` is the monotonic time at which the trial was requested, `listener` the descriptor of the socket at which
    rank 0 meets the others.
    """
    job = request.job
    host_before = process_memory.read().resident
    meter, ranks = _set_up(request, events.enter, listener)
    events.enter("build")
    started = time.monotonic()
    step = build(request.config, job, meter.device)
    build_seconds = time.monotonic() - started
    tokens, accumulation = _batch(step, request, ranks)
    overhead_seconds = time.monotonic() - asked_at - build_seconds
    pace = Pace.of(request, accumulation)
    progress = _with_shares(events.enter, request, pace)
    # A sequence's, without its backward pass.
    progress("forward", 1.0 / (job.workload.batch_per_device * pace.least_share))
    _make_product(meter.device)
    forward_began = time.monotonic()
    reference = _reference_loss(step, tokens[:1], request, ranks)
    forward_seconds = time.monotonic() - forward_began
    meter.reset()  # a user's run has neither the build's temporaries nor this forward

    batches = micro_batches(request.config, job.workload)
    lengths = () if batches is None else tuple((length, batches.rows * weight) for length, weight in batches.nodes)
    steps = Steps(step, tokens, accumulation, meter, progress, events.send, ranks, lengths)
    watch = _watch(pace, request, len(tokens) // step.micro_batch, events.send, asked_at) if ranks.rank == 0 else None
    is_alone = ranks.size == 1 and not needs_process_group(request.config)
    # A backward pass makes two products for each of the forward's, or one and a recomputed one.
    brief = is_alone and reference is not None and is_brief(3 * step.micro_batch * forward_seconds)
    step_seconds = steps.warm_up(warm_ups, watch, brief=brief, evaluated=job.workload.eval_batch)
    problem = _problem(request, step, steps, reference)
    if problem is not None:
        return Ended(outcome=problem, ranks=ranks)
    setup_seconds = time.monotonic() - asked_at
    left_seconds = _seconds_left(pace, ranks, setup_seconds)
    stopped_early = _time(steps, meter, request, ranks, step_seconds, left_seconds, events.send)
    problem = _problem(request, step, steps, reference)
    if problem is not None:
        return Ended(outcome=problem, ranks=ranks)
    measurement = _measurement(
        request,
        meter,
        steps,
        ranks,
        host_baseline_bytes=host_before,
        reference_loss=reference,
        setup_seconds=setup_seconds,
        overhead_seconds=overhead_seconds,
        stopped_early=stopped_early,
    )
    outcome = _compared(measurement, request, step, tokens, steps)
    return Ended(outcome=outcome, record=_recorder(request, step, tokens, ranks), ranks=ranks)


def _set_up(request: TrialRequest, progress: Progress, listener: int | None) -> tuple[Meter, Ranks]:
    """The meter, which enforces the memory limit from now on, and the group."""
    progress("setup")
    use_threads(threads_per_rank(request.job.hardware, request.rendezvous, sharing=request.sharing))
    meter = meter_for(request.job.hardware.kind)
    ranks = _joined(request, progress, listener)
    meter.enforce(request.memory_limit_bytes)
    torch.manual_seed(request.job.workload.seed)
    return meter, ranks


def _joined(request: TrialRequest, progress: Progress, listener: int | None) -> Ranks:
    """The group that the trial's ranks train in. Joined before the memory limit applies: the threads that serve it are
    not part of the trial's memory."""
    if request.rendezvous is None and not needs_process_group(request.config):
        return Ranks()
    progress("meet")
    return join(
        request.job.hardware.kind,
        request.rendezvous,
        # By then the parent has ended the trial.
        timeout_seconds=request.deadline_seconds + 60.0,
        listener=listener,
    )


def _problem(request: TrialRequest, step: TrainingStep, steps: Steps, reference: float | None) -> Diverged | None:
    if request.job.hardware.is_emulated:
        return None  # it computes nothing
    return divergence(
        request.config,
        steps.losses,
        steps.gradient_norms,
        reference,
        norm_spreads=steps.norm_spreads,
        latest_norm=steps.latest_norm,
        later=steps.later_losses.values(),
        dropout=step.dropout,
    )


def _recorder(
    request: TrialRequest, step: TrainingStep, tokens: torch.Tensor, ranks: Ranks
) -> Callable[[], None] | None:
    """A function that records one more step in the files that the request names; None if it names none. In a group,
    rank 0 records, and the others run the step with it."""
    if request.profile is None and request.snapshot is None:
        return None

    def record() -> None:
        process_memory.lift_limit()  # it was for the measured steps, and a profiler needs memory of its own
        if ranks.rank > 0:
            for file in (request.profile, request.snapshot):
                if file is not None:
                    step.run(tokens)
            return
        if request.profile is not None:
            write_profile(request.profile, lambda: step.run(tokens))
        if request.snapshot is not None:
            memory_snapshot(request.snapshot, lambda: step.run(tokens))

    return record


def _batch(step: TrainingStep, request: TrialRequest, ranks: Ranks) -> tuple[torch.Tensor, int]:
    """Tokens of a few micro-batches of the longest sequences, and the accumulation steps in the real global batch.

    All sequences of a rank are the same random tokens: the mean loss is the same whatever the micro-batch, and trials
    are comparable. Each rank has its own: were they the same, so would be the gradients of ranks that never exchange
    them.
    """
    workload = request.job.workload
    accumulation = workload.batch_per_device // step.micro_batch
    generator = torch.Generator().manual_seed(workload.seed)
    row = torch.randint(step.vocabulary, (ranks.size, workload.seq_len), generator=generator)[ranks.rank]
    rows = micro_steps_run(accumulation, request.config) * step.micro_batch
    return row.expand(rows, -1).contiguous().to(step.device), accumulation


def _make_product(device: torch.device) -> None:
    """The first product, of which cuBLAS keeps its workspace: made in the reference's forward pass, that would come to
    lie amid activations, and the allocator could not give their segment back."""
    torch.mm(*[torch.ones(1, 1, device=device)] * 2)


def _reference_loss(step: TrainingStep, tokens: torch.Tensor, request: TrialRequest, ranks: Ranks) -> float | None:
    """The plain forward's loss, the mean over ranks; None where dropout would change it, or where this forward alone
    runs out of memory. With several ranks that raises: they gather parameters together, so none may go on without the
    others."""
    job = request.job
    if step.dropout or job.workload.lora_dropout > 0:
        return None
    try:
        (losses,) = ranks.gathered([step.reference_loss(tokens)])
        return sum(losses) / ranks.size
    except Exception as error:
        if ranks.size > 1 or memory_failure(error, "forward", host_is_device=job.hardware.kind == "cpu") is None:
            raise
        return None


def _compared(
    measurement: Measurement, request: TrialRequest, step: TrainingStep, tokens: torch.Tensor, steps: Steps
) -> Fits | Diverged:
    """`measurement`, with the gradient norm of plain training where the request asks for it; `Diverged` if the step's
    norm is another. Where a micro-step takes long, both are of a part of the sequences. Nothing is compared where
    dropout or other ranks take part, where plain training does not fit, where it overflows, or where nothing is
    computed."""
    job = request.job
    shared = request.rendezvous is not None or needs_process_group(request.config)
    dropout = step.dropout or job.workload.lora_dropout > 0
    if not request.compares_gradient or shared or dropout or job.hardware.is_emulated:
        return Fits(measurement=measurement)
    # Any sequence shows whether the gradients agree, but compiled code is compiled anew for another length. Backwards,
    # the tokens are new to the model: of those that it knows by heart, the gradient may be rounding alone.
    tokens = tokens.flip(1)
    rows = job.workload.batch_per_device * rows_per_sequence(request.config, job.workload)
    seconds = measurement.step_seconds.median * step.micro_batch / rows
    if is_brief(seconds) and request.config.get("compile") is not True:
        tokens = tokens[:, :COMPARED_TOKENS]
    try:
        plain_norm = step.plain_gradient_norm(tokens[:1])
        norm = steps.once(tokens)
    except Exception as error:
        if memory_failure(error, "backward", host_is_device=job.hardware.kind == "cpu") is None:
            raise
        return Fits(measurement=measurement)
    if not math.isfinite(plain_norm) or not math.isfinite(norm):
        return Fits(measurement=measurement)
    diverged = other_gradient(request.config, measurement.losses, norm, plain_norm)
    return diverged or Fits(measurement=replace(measurement, plain_gradient_norm=plain_norm))


def _with_shares(progress: Progress, request: TrialRequest, pace: Pace) -> Progress:
    """`progress` that also says what share of an optimizer step begins: with a forward pass that of a micro-step, with
    the update, whose seconds a step has once, all of it, with an evaluation that of training on as many sequences. None
    if compiled: compiling says nothing of steps."""
    if request.config.get("compile") is True:
        return lambda phase, share=None, /: progress(phase, None if phase in PHASES else share)
    workload = request.job.workload
    evaluated = (workload.eval_batch or 0) / (workload.batch_per_device * pace.least_share)
    shares = {
        "forward": 1.0 / (pace.accumulation * pace.least_share),
        "optimizer": 1.0 / pace.update_share,
        EVALUATION: evaluated,
    }
    return lambda phase, share=None, /: progress(phase, share or shares.get(phase))


def _watch(pace: Pace, request: TrialRequest, micro_steps: int, tell: Tell, asked_at: float) -> Watch:
    """Judges the trial after each micro-step of its warm-up. The first also does what is done only once; compiled ones
    compile in the first step, which says nothing of later ones."""
    compiled = request.config.get("compile") is True

    def watch(number: int, seconds: float) -> None:
        if compiled and number <= micro_steps:
            return
        left = max(0, micro_steps - number) + micro_steps  # of the warm-up, and of one timed step
        elapsed = time.monotonic() - asked_at
        tell(pace.judge(number, seconds, elapsed_seconds=elapsed, micro_steps_left=left))

    return watch


def _seconds_left(pace: Pace, ranks: Ranks, setup_seconds: float) -> float:
    """What the trial may still take once it is set up. The first rank judges, as it does in the warm-up: others do not
    know what the trial has earned."""
    if ranks.rank > 0 or pace.earned or pace.allowance_seconds is None:
        return math.inf
    return pace.allowance_seconds - setup_seconds


def _time(
    steps: Steps,
    meter: Meter,
    request: TrialRequest,
    ranks: Ranks,
    longest_seconds: float,
    left_seconds: float,
    tell: Tell,
) -> bool:
    """Time steps, as `_repeat` does. Then, where sequences have lengths and there is time, run the longest again, whose
    step takes `longest_seconds`: in what the allocator has made of the others' memory."""
    began = time.monotonic()
    tell({"timing": True})
    mixed = Mixed.of(request.config, request.job.workload)
    least = least_repeats(longest_seconds * mixed.together / mixed.longest)
    stopped_early = _repeat(steps, meter, request, ranks, least, left_seconds)
    tell({"timing": False})
    steps.finish()
    if not mixed.is_one_length:
        (is_late,) = ranks.largest([float(time.monotonic() - began + longest_seconds > left_seconds)])
        if not is_late:
            steps.once()
    return stopped_early


def _repeat(steps: Steps, meter: Meter, request: TrialRequest, ranks: Ranks, least: int, left_seconds: float) -> bool:
    """Time steps until their spread is 2 %, the budget is spent or there are 30, but at least so many, with a few more
    while memory grows at every one and a leak could be told within 20 s, or until a rival has surely won; returns
    whether one has. Once a step is timed, none begins that would take the trial beyond the seconds that it has
    left: what it has measured is worth more than being killed."""
    started = time.monotonic()
    # One repeat alone may be slow by chance: single steps scatter by a standard deviation of 2 % in the median trial of
    # the recorded tables, by 12 % in some, and a machine that is shared may slow down for seconds.
    if least >= 2 and all(_hopeless(request, meter, steps.timed(), ranks) for _ in range(2)):
        return True
    while len(steps.seconds) < MOST_REPEATS:
        steps.timed()
        (is_over,) = ranks.largest([float(time.monotonic() - started + steps.round_seconds > left_seconds)])
        if is_over:
            break
        if len(steps.seconds) < least:
            continue
        elapsed = time.monotonic() - started
        growing = may_leak(steps.in_use, meter.leak_noise_bytes, most=int(20.0 * len(steps.in_use) / elapsed))
        elapsed, growing_anywhere = ranks.largest([elapsed, float(growing)])
        settled = is_settled(steps.seconds, elapsed_seconds=elapsed, timing_seconds=request.timing_seconds)
        if settled and not growing_anywhere:
            break
    return False


def _hopeless(request: TrialRequest, meter: Meter, step_seconds: float, ranks: Ranks) -> bool:
    """Whether a rival surely beats this repeat."""
    (memory,) = ranks.largest([meter.reading().device])
    return request.is_beaten(int(memory), step_seconds)


def _measurement(request: TrialRequest, meter: Meter, steps: Steps, ranks: Ranks, **fields: Any) -> Measurement:
    """What the trial has shown; `fields` are those that come from neither the steps nor the meter."""
    job = request.job
    memory = meter.reading()
    median = statistics.median(steps.seconds)
    speed = job.workload.tokens_per_step / median
    return Measurement(
        tokens_per_second=speed,
        step_seconds=step_seconds(steps.seconds),
        mfu=mfu(job, request.config, speed),
        peak_allocated_bytes=memory.peak_allocated,
        peak_reserved_bytes=memory.peak_reserved,
        device_bytes=memory.device,
        host_peak_bytes=memory.host_peak,
        setup_peak_bytes=memory.setup_peak,
        phase_peaks=memory.phase_peaks,
        losses=tuple(steps.losses),
        gradient_norms=tuple(norm if math.isfinite(norm) else None for norm in steps.gradient_norms),
        steps=len(steps.seconds),
        leak_bytes_per_step=leak(steps.in_use, meter.leak_noise_bytes),
        expandable_segments=meter.expandable_segments(),
        ranks=(_rank_measurement(ranks.rank, memory, steps),) if ranks.size > 1 else (),
        **fields,
    )


def _rank_measurement(rank: int, memory: MemoryReading, steps: Steps) -> RankMeasurement:
    return RankMeasurement(
        rank=rank,
        peak_allocated_bytes=memory.peak_allocated,
        peak_reserved_bytes=memory.peak_reserved,
        device_bytes=memory.device,
        host_peak_bytes=memory.host_peak,
        step_seconds=statistics.median(steps.own_seconds),
    )
