"""What the steps of a user's program take, seen from inside of it: in a trial, and in a run that is no trial."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from autofit.core.lattice import Config
from autofit.core.outcome import Measurement
from autofit.techniques import Job
from autofit.trial.measure.leak import leak
from autofit.trial.measure.repeats import step_seconds

if TYPE_CHECKING:
    from autofit.trial.measure.meter import MemoryReading, Meter

T = TypeVar("T")


class StepClock(Generic[T]):
    """Times optimizer steps from end to end, on the device's clock. Used from one thread.

    As in the trials of autofit's own steps, an accelerator is not waited for before the next step is issued.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._queue: deque[tuple[Any, Any, T]] = deque()
        """Of the steps that the device may not have finished: marks at the beginning and the end, and what was given
        with the step."""
        self._latest: Any = None
        """The mark at the end of the last step; None before any."""

    def begin(self) -> None:
        """The next step begins now."""
        self._queue.clear()
        self._latest = self._meter.mark()

    def end_step(self, given: T) -> Iterator[tuple[float | None, T]]:
        """A step was issued. Yields what each step took that the device has finished since the last call, and what was
        given with it; None for a first step whose beginning is not known."""
        mark = self._meter.mark()
        self._queue.append((self._latest, mark, given))
        self._latest = mark
        while len(self._queue) > (self._meter.device.type != "cpu"):
            before, end, earlier = self._queue.popleft()
            yield None if before is None else self._meter.seconds(before, end), earlier


def measurement(
    job: Job,
    config: Config,
    meter: Meter,
    memory: MemoryReading,
    *,
    seconds: Sequence[float],
    in_use: Sequence[int],
    phase: str = "step",
    losses: Sequence[float] = (),
    gradient_norms: Sequence[float] = (),
    setup_seconds: float,
    overhead_seconds: float = 0.0,
    stopped_early: bool = False,
) -> Measurement:
    """What the timed steps of a program show. `seconds` is what each took, `in_use` the bytes in use after each of the
    first of them; `phase` names what the peak of `memory` is of."""
    from autofit.training.flops import mfu

    steps = step_seconds(seconds)
    speed = job.workload.tokens_per_step / steps.median
    return Measurement(
        tokens_per_second=speed,
        step_seconds=steps,
        mfu=mfu(job, config, speed),
        peak_allocated_bytes=memory.peak_allocated,
        peak_reserved_bytes=memory.peak_reserved,
        device_bytes=memory.device,
        host_peak_bytes=memory.host_peak,
        host_baseline_bytes=0,  # what the program imports is its own
        phase_peaks={phase: memory.peak_allocated},
        losses=tuple(losses),
        reference_loss=None,
        steps=len(seconds),
        setup_seconds=setup_seconds,
        overhead_seconds=overhead_seconds,
        gradient_norms=tuple(norm if math.isfinite(norm) else None for norm in gradient_norms),
        setup_peak_bytes=memory.setup_peak,
        leak_bytes_per_step=leak(in_use, meter.leak_noise_bytes),
        expandable_segments=meter.expandable_segments(),
        stopped_early=stopped_early,
    )
