"""Failures of the machinery that runs the trials: how many in a row end a search, and what one config may cost."""

from __future__ import annotations

from dataclasses import dataclass

from autofit.core.errors import EnvironmentLacks
from autofit.core.outcome import Crashed

MACHINERY_FAILURES = 3
"""Consecutive failures of the machinery after which it must be fixed before a trial can show anything."""
MOST_LOST_WORKERS = 3
"""Workers that may be lost while one config runs, in all searches together: it may be what ends them or their node."""


@dataclass(slots=True)
class FailuresInARow:
    """Counts failures of the machinery that no trial that ended otherwise comes between.

    Trials that were under way when a failure was noticed may have failed for the same reason, as all those of a lost
    node do: together they count once.
    """

    count: int = 0
    _begun: int = 0
    """How many trials were begun so far."""
    _noticed: int = 0
    """How many were begun when the last failure that counts was noticed."""

    def begin(self) -> int:
        """The number of the trial that is begun now."""
        self._begun += 1
        return self._begun

    def passed(self) -> None:
        """A trial has ended, and the machinery did not fail."""
        self.count = 0

    def failed(self, number: int, outcome: Crashed) -> None:
        """The machinery has failed in the trial of this number. Raises `EnvironmentLacks` after `MACHINERY_FAILURES`
        in a row."""
        if number > self._noticed:
            self.count += 1
            self._noticed = self._begun
        if self.count >= MACHINERY_FAILURES:
            raise EnvironmentLacks(
                f"{self.count} trials in a row have failed through no fault of their configs, the last: "
                f"{outcome.reason}",
                remedy="fix that, and run the same command: it resumes from here; `autofit doctor` may say more",
            )
