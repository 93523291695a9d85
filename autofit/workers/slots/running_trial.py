"""A trial under way on the workers of one slot: what they were asked, and what they have answered so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from autofit.core.errors import lines_of
from autofit.core.outcome import Crashed, Outcome, OutOfMemory
from autofit.trial.attempt import Attempt
from autofit.trial.process.group import GroupAnswers
from autofit.trial.process.runner import GRACE_SECONDS
from autofit.trial.request import TrialRequest

ASK_SECONDS = 5.0
"""Time between two questions whether a trial waits for its device."""
LOST_SECONDS = GRACE_SECONDS + 60.0
"""A worker says at the latest after `GRACE_SECONDS` that its fork server hangs. One that is silent for this long is
itself gone."""


class RunningTrial:
    """A request that a slot's workers are running."""

    def __init__(self, request: TrialRequest, actors: Sequence[Any], *, worker: str, queued_seconds: float) -> None:
        """Ask the workers of the slot named `worker` to run `request`, which has waited for them. Nothing blocks here:
        Ray passes each answer on as the next call's argument."""
        self.request = request
        """As the workers run it: with their own hardware and stack."""
        self.since = time.monotonic()
        self._worker, self._actors, self._queued_seconds = worker, actors, queued_seconds
        ranks, left = len(actors), request.after_waiting(queued_seconds)
        document = left.to_json()
        self._group = GroupAnswers(ranks=ranks)
        self._place: Any = None
        """Ray's reference to the place where the ranks meet; None for a single worker."""
        if ranks > 1:
            wheres = [actor.where.remote() for actor in actors]
            self._place = actors[0].listen.remote(left.wait_seconds, *wheres)
        self.answers: dict[Any, int] = {
            actor.run.remote(document, self._place, rank): rank for rank, actor in enumerate(actors)
        }
        """Ray's references to the answers still to come, with the rank of each."""
        self._waits: Any = None
        """Ray's reference to the answer to what it waits for; None before that is asked."""
        self._asked_at = self.since
        """When that was asked last, or else when it began."""

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() - self.since > self.request.most_seconds + LOST_SECONDS

    def take(self, ray: Any, reference: Any) -> Attempt | None:
        """Take a worker's answer; returns what the trial came to, or None while other ranks go on.

        Raises `RayError` if the worker was lost."""
        self._group.take(self.answers.pop(reference), _answered(ray, reference))
        return self._ended(self._group.attempt()) if self._group.complete else None

    def lost(self, why: Exception, host: str, *, out_of_memory: bool) -> Attempt:
        """What the trial came to whose worker was lost on the machine `host`: out of host memory if it is what Ray's
        memory monitor has ended it for, which is no reason to run it again."""
        lines = lines_of(why)
        because = next((line for line in lines if " because " in line), lines[-1])
        reason = f"its Ray worker on {host} was lost: {because}"
        outcome: Outcome = Crashed(reason=reason, transient=True, worker_lost=True)
        if out_of_memory:
            outcome = OutOfMemory(reason=reason, host=True)
        return self._ended(Attempt(outcome=outcome, seconds=time.monotonic() - self.since, node=host))

    def _ended(self, attempt: Attempt) -> Attempt:
        return replace(attempt, worker=self._worker, waited_seconds=attempt.waited_seconds + self._queued_seconds)

    def stop_overdue_ranks(self) -> None:
        """Stop those that go on although another has failed."""
        for rank in self._group.overdue():
            self._actors[rank].stop.remote(self._place)

    def note_waiting(self, ray: Any, tell: Callable[[int | None], object]) -> None:
        """Ask now and then whether the trial waits for its device: then `tell` is called, and nothing is overdue."""
        if self._waits is None:
            if time.monotonic() - self._asked_at >= ASK_SECONDS:
                self._asked_at = time.monotonic()
                self._waits = self._actors[0].waits_for.remote()
            return
        if not ray.wait([self._waits], timeout=0)[0]:
            return
        with suppress(ray.exceptions.RayError):  # it was lost, as its trial will show
            if (holder := ray.get(self._waits)) is not None:
                self.since = time.monotonic()
                tell(holder or None)
        self._waits = None


def _answered(ray: Any, reference: Any) -> Attempt:
    """The attempt that a worker answered with. Raises `RayError` if it was lost."""
    lost = ray.exceptions.RayActorError
    try:
        return Attempt.from_json(ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error, lost) or isinstance(error.cause, lost):
            raise  # the call waited for another worker, which was lost
        reason = f"the worker failed: {lines_of(error)[-1]}"
        return Attempt(outcome=Crashed(reason=reason, transient=True), seconds=0.0)
