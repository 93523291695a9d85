"""The steps of one trial: runs them, times them between device marks, and keeps what each has shown."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autofit.core.outcome import EVALUATION
from autofit.training.distributed.ranks import Ranks
from autofit.training.step import TrainingStep
from autofit.trial.measure.meter import Meter
from autofit.trial.measure.pace import OVERFLOWS
from autofit.trial.process.events import Event, EventPipe


@dataclass(slots=True)
class _Issued:
    """A step that the device may still be working on."""

    loss: torch.Tensor
    gradient_norm: torch.Tensor
    marks: list[Any]
    in_use: int
    length: int
    """Tokens of each sequence."""
    weight: float | None
    """Its part in a mean step; None where it is not timed."""


class Steps:
    """Runs optimizer steps on a few micro-batches and extrapolates their time to the full accumulation.

    Where the data's sequences have lengths, a timed step is the mean of several, each on the beginning of the tokens,
    with the weights of these lengths (`Batches.nodes`).

    An accelerator works through a queue that training keeps filled; a timer that waited for each step would also time
    the refilling. So a step is read only once the next one has been issued, and beside the queue; the host has none.
    (transformers itself waits for the device in each forward pass: see `TrainingStep.run`.)

    The ranks agree on what a step has shown when it is read, outside of what is timed: they then all base the same
    decisions on it, and none begins the next step long before the others.
    """

    def __init__(
        self,
        step: TrainingStep,
        tokens: torch.Tensor,
        accumulation: int,
        meter: Meter,
        events: EventPipe,
        ranks: Ranks | None = None,
        lengths: Sequence[tuple[int, float]] = (),
    ) -> None:
        """`lengths`: tokens of a sequence, with their weights in a mean step; if there are none, every one is full."""
        self._step = step
        self._tokens = tokens
        self._mixes = any(length != tokens.shape[1] for length, _ in lengths)
        self._lengths = lengths or ((tokens.shape[1], 1.0),)
        self._next_length = itertools.cycle(self._lengths)
        self._means: list[tuple[float, float, float]] = []
        """For each step since the last mean: weight, seconds of the slowest rank, and of this one."""
        self._accumulation = accumulation
        self._meter = meter
        self._events = events
        self._ranks = ranks or Ranks()
        self._queue: deque[_Issued] = deque()
        self.latest_norm = math.nan
        """Of the latest step that was read."""
        self.round_seconds = 0.0
        """What the steps of the latest mean took together, each composed."""
        self._is_warm = False
        self._watched = 0
        """Micro-steps that were watched."""
        self._timed_with: Callable[[str], Any] = self._announced
        self._lag = 0 if meter.device.type == "cpu" else 1
        self.seconds: list[float] = []
        """Of each timed step, composed to the global batch: those of the slowest rank."""
        self.own_seconds: list[float] = []
        """The same for this rank alone."""
        self.losses: list[float] = []
        """Of every step, in nats per token. With lengths only of the warm-up on the whole tokens, after which updates
        on other lengths come between, and of what is not finite."""
        self.later_losses: dict[int, list[float]] = {}
        """With lengths, by length, those after that of steps that updated the weights."""
        self.gradient_norms: list[float] = []
        """Of the steps of `losses`, before clipping; the largest of any rank."""
        self.norm_spreads: list[float] = []
        """Of every step: how far apart the ranks' gradient norms lie, relative to the largest."""
        self.in_use: list[int] = []
        """Bytes still in use after every step since the warm-up, which creates what then stays."""

    def warm_up(
        self,
        enough: Callable[[float], int],
        watch: Callable[[int, float], None] | None = None,
        *,
        brief: bool = False,
        evaluated: int | None = None,
    ) -> float:
        """Run steps, attributing memory to phases, until as many of them have updated the weights as are `enough` for
        steps that take so long; at most `OVERFLOWS`.

        Under loss scaling the first updates are skipped until the scale is small enough. If `brief`, the first step is
        one micro-step and its update. Memory is attributed in the timed steps, too, if there was one step alone, whose
        forward and backward had no optimizer states beside them, and for several accelerators: DDP makes new buckets in
        the second step, and stage 3 of ZeRO prefetches from then on. Where sequences have lengths, timed steps are on
        shorter ones, so there are at least two. Then so many sequences are `evaluated` together, so that timed steps
        train in what that leaves of the allocator's memory. `watch` is called after each micro-step with its number,
        from 1 on, and its seconds. Returns the seconds of the last step, as it ran.
        """
        updates, slowest = 0, 0.0
        for number in range(OVERFLOWS):
            self._issue(self._booked, watch, self._tokens[: self._step.micro_batch] if brief and not number else None)
            first, *_, last = self._queue[-1].marks
            (slowest,) = self._ranks.largest([self._meter.seconds(first, last)])
            self._settle(0)
            updates += math.isfinite(self.gradient_norms[-1])
            if updates >= enough(slowest) and (number or not self._mixes):
                attributes = number == 0 or (self._lag > 0 and self._ranks.size > 1)
                self._timed_with = self._booked if attributes else self._announced
                break
        self._is_warm = True
        if evaluated is not None:
            with self._booked(EVALUATION):
                self._step.evaluate(self._tokens[:1].expand(evaluated, -1).contiguous())
        for length, _ in self._lengths if self._mixes else ():
            # What is done once for a length is not timed: compiling, and finding a loss scale.
            for _ in range(OVERFLOWS):
                if math.isfinite(self.once(self._tokens[:, :length])):
                    break
        for _ in range(self._lag):
            self._issue(self._timed_with)  # fills the queue; it found it empty, so it is not timed
        self.in_use.clear()
        return slowest

    def timed(self) -> float:
        """Run one more step; returns the composed seconds of the newest one that the device has finished."""
        timed = len(self.seconds)
        while len(self.seconds) == timed:
            length, weight = next(self._next_length)
            self._issue(self._timed_with, tokens=self._tokens[:, :length], weight=weight)
            self._settle(self._lag)
        return self.seconds[-1]

    def once(self, tokens: torch.Tensor | None = None) -> float:
        """Run one more step, on `tokens` or on all, and wait for it; it is not timed, as the queue was empty. Returns
        the gradient's norm."""
        self._issue(self._timed_with, tokens=tokens)
        self._settle(0)
        return self.latest_norm

    def finish(self) -> None:
        """Wait for the device; a step that was issued only to keep it busy counts like any other."""
        self._settle(0)

    def _issue(
        self,
        observe: Callable[[str], Any],
        watch: Callable[[int, float], None] | None = None,
        tokens: torch.Tensor | None = None,
        weight: float | None = None,
    ) -> None:
        tokens = self._tokens if tokens is None else tokens
        marks: list[Any] = []
        micro_steps = len(tokens) // self._step.micro_batch if watch else 0

        def mark() -> None:
            marks.append(self._meter.mark())
            if watch is not None and 1 < len(marks) <= micro_steps + 1:
                self._watched += 1
                watch(self._watched, self._meter.seconds(marks[-2], marks[-1]))

        loss = self._step.run(tokens, observe, mark)
        norm, in_use = self._step.gradient_norm, self._meter.in_use()
        self._queue.append(_Issued(loss, norm, marks, in_use, tokens.shape[1], weight))

    def _settle(self, left: int) -> None:
        """Read steps until `left` remain in the queue."""
        while len(self._queue) > left:
            issued = self._queue.popleft()
            spans = [self._meter.seconds(a, b) for a, b in itertools.pairwise(issued.marks)]
            own_seconds = composed(spans, self._accumulation)
            scalars = [self._meter.scalar(value) for value in (issued.loss, issued.gradient_norm)]
            seconds, shares, norms = self._ranks.gathered([own_seconds, *scalars])
            self.in_use.append(issued.in_use)
            self.latest_norm = max(norms)
            self.norm_spreads.append(relative_range(norms))
            if not self._mixes or not self._is_warm or not math.isfinite(sum(shares)):
                self.losses.append(sum(shares))
                self.gradient_norms.append(max(norms))
            elif math.isfinite(max(norms)):
                self.later_losses.setdefault(issued.length, []).append(sum(shares))
            if issued.weight is not None:
                self._count(issued.weight, max(seconds), own_seconds)

    def _count(self, weight: float, seconds: float, own_seconds: float) -> None:
        """Add a step that was timed; with the last of the lengths, their mean is known."""
        self._means.append((weight, seconds, own_seconds))
        if len(self._means) < len(self._lengths):
            return
        self.seconds.append(math.fsum(weight * slowest for weight, slowest, _ in self._means))
        self.own_seconds.append(math.fsum(weight * own_seconds for weight, _, own_seconds in self._means))
        self.round_seconds = math.fsum(slowest for _, slowest, _ in self._means)
        self._events.send(Event(step_seconds=self.seconds[-1]))
        self._means.clear()

    @contextmanager
    def _booked(self, phase: str) -> Iterator[None]:
        self._events.enter(phase)
        with self._meter.phase(phase):
            yield
        self._events.send(Event(peak_bytes=self._meter.peaks[phase]))

    @contextmanager
    def _announced(self, phase: str) -> Iterator[None]:
        self._events.enter(phase)
        yield


def relative_range(values: Sequence[float]) -> float:
    """How far apart `values`, none of them negative, lie, relative to the largest; 0 if all are equal."""
    least, most = min(values), max(values)
    if least == most:
        return 0.0
    return (most - least) / most if math.isfinite(most) else math.inf


def composed(spans: Sequence[float], accumulation: int) -> float:
    """Seconds of an optimizer step of `accumulation` micro-steps, from those of fewer and of the update, in order.

    The first micro-step differs from later ones because it creates the gradients, and the last one does where ranks
    exchange gradients only once per step: of three, the middle one stands for all in between.
    """
    *micro_steps, update = spans
    between = micro_steps[1:-1] or micro_steps[-1:]
    return sum(micro_steps) + (accumulation - len(micro_steps)) * between[0] + update
