"""One fork server for the trials of several commands, each of which would start its own and wait for its imports."""

from __future__ import annotations

from collections.abc import Callable

from autofit.trial.attempt import Attempt
from autofit.trial.process.group_runner import GroupRunner
from autofit.trial.process.runner import TrialRunner
from autofit.trial.request import TrialRequest


class Kept:
    """In place of the class whose instances commands make: each gets the same runner, and closes nothing."""

    def __init__(
        self,
        runner: TrialRunner | GroupRunner,
        *,
        ranks: int = 1,
        changed: Callable[[TrialRequest], TrialRequest] = lambda request: request,
    ) -> None:
        self._runner, self._ranks, self._changed = runner, ranks, changed
        self.start = runner.start

    def __call__(self, *, kind: str, ranks: int) -> Kept:
        assert (kind, ranks) == ("cpu", self._ranks)
        return self

    def attempt(self, request: TrialRequest) -> Attempt:
        """What becomes of the request, as this changes it."""
        return self._runner.attempt(self._changed(request))

    def close(self) -> None:
        """Not yet."""

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *error: object) -> None:
        """Not yet."""
