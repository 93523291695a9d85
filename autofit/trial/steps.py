"""The steps of one trial: run, timed between device marks, with what each has shown."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autofit.training.step import TrainingStep
from autofit.trial.meter import Meter

Progress = Callable[[str], None]
"""Called with the name of each phase as it begins, so that the parent knows where a killed child was."""


@dataclass(slots=True)
class _Issued:
    """A step that the device may still be working on."""

    loss: torch.Tensor
    gradient_norm: torch.Tensor
    marks: list[Any]
    in_use: int


class Steps:
    """Runs optimizer steps on at most two micro-batches and composes their time to the whole accumulation.

    An accelerator works through a queue that training keeps filled; a timer that waited for each step would time the
    refilling as well. So a step is read only when the next one has been issued; the host has no queue.
    """

    def __init__(
        self, step: TrainingStep, tokens: torch.Tensor, accumulation: int, meter: Meter, progress: Progress
    ) -> None:
        self._step = step
        self._tokens = tokens
        self._accumulation = accumulation
        self._meter = meter
        self._progress = progress
        self._queue: deque[_Issued] = deque()
        self._lag = 0 if meter.device.type == "cpu" else 1
        self.seconds: list[float] = []
        """Of each timed step, composed to the global batch."""
        self.losses: list[float] = []
        """Of every step, in nats per token."""
        self.gradient_norms: list[float] = []
        """Of every step, before clipping."""
        self.in_use: list[int] = []
        """Bytes that stayed in use after every step."""

    def warm_up(self, least: int, most: int) -> None:
        """Run steps, memory booked by phase, until `least` of them have updated the weights; at most `most`.

        Under loss scaling the first updates are skipped until the scale is small enough.
        """
        updates = 0
        for _ in range(most):
            self._issue(self._booked)
            self._settle(0)
            updates += torch.isfinite(torch.tensor(self.gradient_norms[-1])).item() is True
            if updates == least:
                break
        self.seconds.clear()
        for _ in range(2 * self._lag):
            self._issue(self._announced)  # fills the queue; the first, which found it empty, is not timed
            self._settle(self._lag)
        self.seconds.clear()

    def timed(self) -> float:
        """Run one more step; composed seconds of the newest one that the device has finished."""
        timed = len(self.seconds)
        while len(self.seconds) == timed:
            self._issue(self._announced)
            self._settle(self._lag)
        return self.seconds[-1]

    def finish(self) -> None:
        """Wait for the device; a step that was issued only to keep it busy counts as any other."""
        self._settle(0)

    def _issue(self, observe: Callable[[str], Any]) -> None:
        marks: list[Any] = []
        loss = self._step.run(self._tokens, observe, lambda: marks.append(self._meter.mark()))
        self._queue.append(_Issued(loss, self._step.gradient_norm, marks, self._meter.in_use()))

    def _settle(self, left: int) -> None:
        """Read steps until `left` are in the queue."""
        while len(self._queue) > left:
            issued = self._queue.popleft()
            spans = [self._meter.seconds(a, b) for a, b in itertools.pairwise(issued.marks)]
            first, further, update = spans[0], spans[-2], spans[-1]
            self.seconds.append(first + (self._accumulation - 1) * further + update)
            self.losses.append(float(issued.loss))
            self.gradient_norms.append(float(issued.gradient_norm))
            self.in_use.append(issued.in_use)

    @contextmanager
    def _booked(self, phase: str) -> Iterator[None]:
        self._progress(phase)
        with self._meter.phase(phase):
            yield

    @contextmanager
    def _announced(self, phase: str) -> Iterator[None]:
        self._progress(phase)
        yield
