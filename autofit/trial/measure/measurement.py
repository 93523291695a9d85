"""The measurement: build the step, check it, warm it up, and time it until the figure is steady."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from autofit.core.outcome import EVALUATION, Diverged, Fits, Measurement, Outcome, RankMeasurement
from autofit.techniques import needs_process_group
from autofit.techniques.axes.batching import micro_batches, rows_per_sequence
from autofit.techniques.axes.sharding import micro_steps_run
from autofit.training.build import build
from autofit.training.distributed.ranks import Ranks, join
from autofit.trial.machine.cores import threads_per_rank, use_threads
from autofit.trial.measure import process_memory
from autofit.trial.measure.divergence import divergence, other_gradient
from autofit.trial.measure.figures import MOST_REPEATS, is_settled, may_leak, measured
from autofit.trial.measure.meter import meter_for
from autofit.trial.measure.pace import Mixed, Pace, is_brief, least_repeats, makes_kernels, warm_ups
from autofit.trial.measure.recording import memory_snapshot, write_profile
from autofit.trial.measure.steps import Steps
from autofit.trial.process.classify import memory_failure
from autofit.trial.process.events import Event, EventPipe
from autofit.trial.request import TrialRequest

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
    return _TrialRun(request, events, asked_at, listener).measured()


def shares_of_a_step(request: TrialRequest, pace: Pace) -> dict[str, float]:
    """What share of an optimizer step each phase is: the forward pass that of a micro-step, the update, whose seconds a
    step has once, all of it, an evaluation that of training on as many sequences. Nothing where kernels are
    made first, which says nothing of steps."""
    if makes_kernels(request.config):
        return {}
    workload = request.job.workload
    return {
        "forward": 1.0 / (pace.accumulation * pace.least_share),
        "optimizer": 1.0 / pace.update_share,
        EVALUATION: (workload.eval_batch or 0) / (workload.batch_per_device * pace.least_share),
    }


class _TrialRun:
    """One rank's trial."""

    def __init__(self, request: TrialRequest, events: EventPipe, asked_at: float, listener: int | None) -> None:
        """Build the step, with the memory limit enforced from before that on."""
        self._request, self._events, self._asked_at = request, events, asked_at
        self._job, self._workload = request.job, request.job.workload
        self._host_baseline_bytes = process_memory.read().resident
        events.enter("setup")
        use_threads(threads_per_rank(self._job.hardware, request.rendezvous, sharing=request.sharing))
        self._meter = meter_for(self._job.hardware.kind)
        # Before the memory limit applies: the threads that serve the group are not part of the trial's memory.
        self._ranks = self._join(listener)
        self._meter.enforce(request.memory_limit_bytes)
        torch.manual_seed(self._workload.seed)
        events.enter("build")
        started = time.monotonic()
        self._step = build(request.config, self._job, self._meter.device)
        build_seconds = time.monotonic() - started
        accumulation = self._workload.batch_per_device // self._step.micro_batch
        self._tokens = self._batch(micro_steps_run(accumulation, request.config) * self._step.micro_batch)
        self._overhead_seconds = time.monotonic() - asked_at - build_seconds
        self._pace = Pace.of(request, accumulation)
        batches = micro_batches(request.config, self._workload)
        lengths = () if batches is None else tuple((length, batches.rows * weight) for length, weight in batches.nodes)
        self._steps = Steps(self._step, self._tokens, accumulation, self._meter, events, self._ranks, lengths)

    def measured(self) -> Ended:
        self._events.shares = shares_of_a_step(self._request, self._pace)
        # A sequence's, without its backward pass.
        share = 1.0 / (self._workload.batch_per_device * self._pace.least_share)
        self._events.enter("forward", share if self._events.shares else None)
        # cuBLAS keeps its workspace from the first product on. Made in the reference's forward pass, that would come to
        # lie amid activations, and the allocator could not give their segment back.
        torch.mm(*[torch.ones(1, 1, device=self._meter.device)] * 2)
        began = time.monotonic()
        reference = self._reference_loss()
        forward_seconds = time.monotonic() - began
        self._meter.reset()  # a user's run has neither the build's temporaries nor this forward

        is_alone = self._ranks.size == 1 and not needs_process_group(self._request.config)
        # A backward pass makes two products for each of the forward's, or one and a recomputed one.
        brief = is_alone and reference is not None and is_brief(3 * self._step.micro_batch * forward_seconds)
        watch = self._judge_micro_step if self._ranks.rank == 0 else None
        longest_seconds = self._steps.warm_up(warm_ups, watch, brief=brief, evaluated=self._workload.eval_batch)
        if (problem := self._divergence(reference)) is not None:
            return Ended(outcome=problem, ranks=self._ranks)
        setup_seconds = time.monotonic() - self._asked_at
        stopped_early = self._time(longest_seconds, setup_seconds)
        if (problem := self._divergence(reference)) is not None:
            return Ended(outcome=problem, ranks=self._ranks)
        outcome = self._compared(self._measurement(reference, setup_seconds, stopped_early))
        records = self._request.profile is not None or self._request.snapshot is not None
        return Ended(outcome=outcome, record=self._record if records else None, ranks=self._ranks)

    def _join(self, listener: int | None) -> Ranks:
        """The group that the trial's ranks train in."""
        if self._request.rendezvous is None and not needs_process_group(self._request.config):
            return Ranks()
        self._events.enter("meet")
        return join(
            self._job.hardware.kind,
            self._request.rendezvous,
            # By then the parent has ended the trial.
            timeout_seconds=self._request.deadline_seconds + 60.0,
            listener=listener,
        )

    def _batch(self, rows: int) -> torch.Tensor:
        """Tokens of so many of the longest sequences.

        All sequences of a rank are the same random tokens: the mean loss is the same whatever the micro-batch, and
        trials are comparable. Each rank has its own: were they the same, so would be the gradients of ranks that never
        exchange them.
        """
        generator = torch.Generator().manual_seed(self._workload.seed)
        shape = (self._ranks.size, self._workload.seq_len)
        row = torch.randint(self._step.vocabulary, shape, generator=generator)[self._ranks.rank]
        return row.expand(rows, -1).contiguous().to(self._step.device)

    @property
    def _has_dropout(self) -> bool:
        return self._step.dropout or self._workload.lora_dropout > 0

    def _is_memory_failure(self, error: Exception, phase: str) -> bool:
        return memory_failure(error, phase, host_is_device=self._job.hardware.kind == "cpu") is not None

    def _reference_loss(self) -> float | None:
        """The plain forward's loss, the mean over ranks; None where dropout would change it, or where this forward
        alone runs out of memory. With several ranks that raises: they gather parameters together, so none may go on
        without the others."""
        if self._has_dropout:
            return None
        try:
            (losses,) = self._ranks.gathered([self._step.reference_loss(self._tokens[:1])])
            return sum(losses) / self._ranks.size
        except Exception as error:
            if self._ranks.size > 1 or not self._is_memory_failure(error, "forward"):
                raise
            return None

    def _judge_micro_step(self, number: int, seconds: float) -> None:
        """Judge the trial after a micro-step of its warm-up. The first also does what is done only once, and a step in
        which kernels are made says nothing of later ones."""
        micro_steps = len(self._tokens) // self._step.micro_batch
        if makes_kernels(self._request.config) and number <= micro_steps:
            return
        left = max(0, micro_steps - number) + micro_steps  # of the warm-up, and of one timed step
        elapsed = time.monotonic() - self._asked_at
        self._events.send(self._pace.judge(number, seconds, elapsed_seconds=elapsed, micro_steps_left=left))

    def _divergence(self, reference: float | None) -> Diverged | None:
        """The outcome if the steps so far are not sound training."""
        if self._job.hardware.is_emulated:
            return None  # it computes nothing
        return divergence(
            self._request.config,
            self._steps.losses,
            self._steps.gradient_norms,
            reference,
            norm_spreads=self._steps.norm_spreads,
            latest_norm=self._steps.latest_norm,
            later=self._steps.later_losses.values(),
            dropout=self._step.dropout,
        )

    def _time(self, longest_seconds: float, setup_seconds: float) -> bool:
        """Time steps, as `_repeat` does. Then, where sequences have lengths and there is time, run the longest again,
        whose step takes `longest_seconds`: in what the allocator has made of the others' memory."""
        left_seconds = math.inf
        # The first rank judges, as it does in the warm-up: others do not know what the trial has earned.
        if self._ranks.rank == 0 and not self._pace.earned and self._pace.allowance_seconds is not None:
            left_seconds = self._pace.allowance_seconds - setup_seconds
        until = time.monotonic() + left_seconds
        self._events.send(Event(timing=True))
        mixed = Mixed.of(self._request.config, self._workload)
        stopped_early = self._repeat(least_repeats(longest_seconds * mixed.together / mixed.longest), until)
        self._events.send(Event(timing=False))
        self._steps.finish()
        if not mixed.is_one_length and not self._is_over(longest_seconds, until):
            self._steps.once()
        return stopped_early

    def _is_over(self, seconds: float, until: float) -> bool:
        """Whether work of so many seconds would end after `until` on any rank."""
        (is_late,) = self._ranks.largest([float(time.monotonic() + seconds > until)])
        return bool(is_late)

    def _repeat(self, least: int, until: float) -> bool:
        """Time steps until their spread is 2 %, the time for repeats is spent or there are `MOST_REPEATS`, but at least
        so many, with a few more while memory grows at every one and a leak could be told within 20 s; or until a rival
        has surely won, and whether one has is returned. Once a step is timed, none begins that would go on beyond
        `until`: what the trial has measured is worth more than being killed."""
        steps, started = self._steps, time.monotonic()
        # One repeat alone may be slow by chance: single steps scatter by a standard deviation of 2 % in the median
        # trial of the recorded tables, by 12 % in some, and a machine that is shared may slow down for seconds.
        if least >= 2 and all(self._is_beaten(steps.timed()) for _ in range(2)):
            return True
        while len(steps.seconds) < MOST_REPEATS:
            steps.timed()
            if self._is_over(steps.round_seconds, until):
                break
            if len(steps.seconds) < least:
                continue
            elapsed = time.monotonic() - started
            most = int(20.0 * len(steps.in_use) / elapsed)
            growing = may_leak(steps.in_use, self._meter.leak_noise_bytes, most=most)
            elapsed, growing_anywhere = self._ranks.largest([elapsed, float(growing)])
            timing_seconds = self._request.timing_seconds
            settled = is_settled(steps.seconds, elapsed_seconds=elapsed, timing_seconds=timing_seconds)
            if settled and not growing_anywhere:
                break
        return False

    def _is_beaten(self, step_seconds: float) -> bool:
        (device_bytes,) = self._ranks.largest([self._meter.reading().device_bytes])
        return self._request.is_beaten(int(device_bytes), step_seconds)

    def _measurement(self, reference: float | None, setup_seconds: float, stopped_early: bool) -> Measurement:
        steps, memory = self._steps, self._meter.reading()
        of_this_rank = RankMeasurement(
            rank=self._ranks.rank,
            peak_allocated_bytes=memory.peak_allocated_bytes,
            peak_reserved_bytes=memory.peak_reserved_bytes,
            device_bytes=memory.device_bytes,
            host_peak_bytes=memory.host_peak_bytes,
            step_seconds=statistics.median(steps.own_seconds),
        )
        return measured(
            self._job,
            self._request.config,
            self._meter,
            memory,
            seconds=steps.seconds,
            in_use=steps.in_use,
            losses=steps.losses,
            gradient_norms=steps.gradient_norms,
            setup_seconds=setup_seconds,
            overhead_seconds=self._overhead_seconds,
            stopped_early=stopped_early,
            host_baseline_bytes=self._host_baseline_bytes,
            reference_loss=reference,
            ranks=(of_this_rank,) if self._ranks.size > 1 else (),
        )

    def _compared(self, measurement: Measurement) -> Fits | Diverged:
        """`measurement`, with the gradient norm of plain training where the request asks for it; `Diverged` if the
        step's norm is another. Where a micro-step takes long, both are of a part of the sequences. Nothing is compared
        where dropout or other ranks take part, where plain training does not fit, where it overflows, or where nothing
        is computed."""
        request = self._request
        shared = request.rendezvous is not None or needs_process_group(request.config)
        if not request.compares_gradient or shared or self._has_dropout or self._job.hardware.is_emulated:
            return Fits(measurement=measurement)
        # Any sequence shows whether the gradients agree, but compiled code is compiled anew for another length.
        # Backwards, the tokens are new to the model: of those that it knows by heart, the gradient may be rounding
        # alone.
        tokens = self._tokens.flip(1)
        rows = self._workload.batch_per_device * rows_per_sequence(request.config, self._workload)
        seconds = measurement.step_seconds.median * self._step.micro_batch / rows
        if is_brief(seconds) and request.config.get("compile") is not True:
            tokens = tokens[:, :COMPARED_TOKENS]
        try:
            plain_norm = self._step.plain_gradient_norm(tokens[:1])
            norm = self._steps.once(tokens)
        except Exception as error:
            if not self._is_memory_failure(error, "backward"):
                raise
            return Fits(measurement=measurement)
        if not math.isfinite(plain_norm) or not math.isfinite(norm):
            return Fits(measurement=measurement)
        diverged = other_gradient(request.config, measurement.losses, norm, plain_norm)
        return diverged or Fits(measurement=replace(measurement, plain_gradient_norm=plain_norm))

    def _record(self) -> None:
        """Record one more step in each of the files that the request names. In a group, rank 0 records, and the others
        run the steps with it."""
        process_memory.lift_limit()  # it was for the measured steps, and a profiler needs memory of its own
        for file, write in ((self._request.profile, write_profile), (self._request.snapshot, memory_snapshot)):
            if file is not None and self._ranks.rank == 0:
                write(file, lambda: self._step.run(self._tokens))
            elif file is not None:
                self._step.run(self._tokens)
