"""What the steps of a user's program take, seen from inside of it: in a trial, and in a run that is no trial."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from autofit.trial.measure.meter import Meter

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
