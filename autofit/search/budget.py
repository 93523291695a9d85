"""What a search may spend, and what is left of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from autofit.trial.request import DEADLINE_SECONDS

TIMING_SECONDS = 4.0
"""Time spent on the repeats of one trial: enough to rank. The winner is timed for longer when it is verified."""
VERIFICATION_SECONDS = 20.0
"""Time spent on the repeats of that verification, unless they agree sooner: its figure is the one that users see. In
ten seconds a two-second step has five repeats, of which a single slow one makes the interval a third of the figure."""
GRACE_SECONDS = 10.0
"""How far a trial begun in time may overrun the budget: killing it then would waste what it has cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a search must end, whatever it has found."""

    memory_bytes: int
    max_trials: int | None = None
    """Including verification."""
    seconds: float | None = None
    deadline_seconds: float = DEADLINE_SECONDS
    """Deadline of one trial."""


@dataclass(slots=True, kw_only=True)
class Budget:
    """The limits, checked against a clock that starts with the search."""

    limits: Limits
    _started: float = field(init=False, default_factory=lambda: time.monotonic())

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self._started

    @property
    def seconds_left(self) -> float | None:
        """What is left of the time budget; None without one."""
        return None if self.limits.seconds is None else self.limits.seconds - self.elapsed_seconds

    def trials_left(self, begun: int) -> float:
        """How many more trials may begin; infinite without a limit."""
        return float("inf") if self.limits.max_trials is None else self.limits.max_trials - begun

    def left_for_trial(self, reserved_seconds: float = 0.0) -> float:
        """Seconds that a trial begun now may take before the search's time is over; infinite without a budget."""
        left = self.seconds_left
        return float("inf") if left is None else max(0.0, left - reserved_seconds) + GRACE_SECONDS
