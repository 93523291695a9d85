"""The time and trials that a search may spend, and what is left of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from autofit.planning.plan import Limits
from autofit.planning.requests import USUAL_SECONDS

TIMING_SECONDS = 3.0
"""Time spent on the repeats of one trial, beyond the minimum number: enough to rank. More would hardly make its figure
more certain, because executions of one config differ, too. Kalibera and Jones (2013) derive how many repeats are worth
their time: sqrt(c/t) s/b, where an execution costs c before its first timed step, a step takes t and scatters by s, and
executions differ by b. With what was measured on two cores (c/t of 3, s of 5 %; b of 1 to 10 % in benchmarks/README.md,
noise), that is 0.9 to 9: a few."""
VERIFICATION_SECONDS = 5.0
"""Time spent on the repeats of the winner's verification, unless they agree sooner: users see its figure and spread.
Not more, for the same reason: it is the second execution that makes the figure more certain."""
LEAST_DEADLINE_SECONDS = 90.0
"""No trial is taken to hang before this: start, set-up and an unlucky compilation may take that long."""

ALLOWANCE_SHARE = 0.1
"""Share of the time budget (`USUAL_SECONDS` without one) that any trial may take: a wrong prediction may cost that
much, but not the search."""
ALLOWANCE_FACTOR = 1.5
"""Multiple of its expected duration that a trial may take, if that is longer than `ALLOWANCE_SHARE` allows."""


def wall_clock() -> float:
    return time.monotonic()


@dataclass(slots=True, kw_only=True)
class Budget:
    """The limits, checked against a clock that starts with the search."""

    limits: Limits
    clock: Callable[[], float] = wall_clock
    """Seconds since some moment."""
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    @property
    def elapsed_seconds(self) -> float:
        return self.clock() - self._started

    @property
    def seconds_left(self) -> float | None:
        """Seconds left of the time budget; None without one."""
        return None if self.limits.seconds is None else self.limits.seconds - self.elapsed_seconds

    def trials_left(self, begun: int) -> float:
        """How many more trials may begin; infinite without a limit."""
        return float("inf") if self.limits.max_trials is None else self.limits.max_trials - begun

    def left_for_trial(self, reserved_seconds: float = 0.0) -> float:
        """Seconds that a trial begun now may take before the search's time is over; infinite without a budget."""
        seconds_left = self.seconds_left
        # A trial begun in time may overrun the budget by 10 s: to kill it then would waste what it has cost.
        return float("inf") if seconds_left is None else max(0.0, seconds_left - reserved_seconds) + 10.0

    def is_spent(self, begun: int) -> bool:
        """Whether no further trial may begin."""
        seconds_left = self.seconds_left
        return self.trials_left(begun) <= 0 or (seconds_left is not None and seconds_left <= 0)

    def allowance_seconds(self, expected_seconds: float) -> float:
        """Seconds that a trial expected to take `expected_seconds` may take unless it shows that it may be the best."""
        total = USUAL_SECONDS if self.limits.seconds is None else self.limits.seconds
        return max(ALLOWANCE_SHARE * total, ALLOWANCE_FACTOR * expected_seconds)

    def patience_seconds(self, expected_seconds: float) -> float:
        """Seconds after which a trial expected to take `expected_seconds` counts as hung: five times that or, if
        longer, a fifth of the time budget: five hangs may use it up, one may not. Without a budget, the deadline."""
        if self.limits.seconds is None:
            return self.limits.deadline_seconds
        patience = max(LEAST_DEADLINE_SECONDS, 0.2 * self.limits.seconds, 5.0 * expected_seconds)
        return min(self.limits.deadline_seconds, patience)
