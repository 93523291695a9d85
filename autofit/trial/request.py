"""What a trial is asked to do, as one JSON object that any machine of a cluster understands."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from autofit.core.document import Document
from autofit.core.lattice import Config
from autofit.core.outcome import DEADLINE_SECONDS, Trial, now
from autofit.core.prediction import Prediction
from autofit.techniques import Job
from autofit.training.distributed.rendezvous import Rendezvous
from autofit.trial.attempt import Attempt

RECORDING_SECONDS = 600.0
"""What a trial that has answered may still take for its recordings: no part of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival(Document):
    """A measured config that a trial is compared with while it runs."""

    device_bytes: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest(Document):
    """One config to run."""

    job: Job
    config: Config
    memory_limit_bytes: int
    deadline_seconds: float = DEADLINE_SECONDS
    """After which the trial is taken to hang, and killed."""
    allowance_seconds: float | None = None
    """What the trial may take unless its micro-steps show that it may beat every rival; None for the whole deadline."""
    wait_seconds: float = math.inf
    """How long it may wait for its device, where other processes' trials use that."""
    timing_seconds: float = 20.0
    """Spent on repeats, beyond the minimum number, until they agree."""
    rivals: tuple[Rival, ...] = ()
    """Configs that make this one hopeless if one of them is both no heavier and much faster."""
    least_tokens_per_second: float = 0.0
    """What makes the config's method practical beside what is measured: a slower trial need not be finished."""
    compares_gradient: bool = False
    """Whether to compare the gradient with plain training's, after the measurement."""
    sharing: int = 1
    """How many ranks, of this trial and of others at the same time, share the cores of its machine with each rank of
    it, itself included; those of its own group on one machine are counted anyway."""
    snapshot: str | None = None
    """File for PyTorch's memory snapshot."""
    profile: str | None = None
    """File for a profiler trace of one step."""
    folder: str | None = None
    """Where the workload's program is started: where the request was first serialised, by the user's process."""
    rendezvous: Rendezvous | None = None
    """In a trial of several ranks, which one this is and where it meets the others; None for a process on its own."""
    asked: tuple[str, float] | None = field(default=None, compare=False)
    """When the trial was requested: which clock, and seconds on it; None until the request is first serialised."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object. The first serialisation sets the time of asking; whatever passes it on keeps that."""
        given_by_user = self.job.workload.program is not None
        return {
            **Document.to_json(self),
            "asked": self.asked or (_clock(), time.monotonic()),
            "folder": self.folder or (os.getcwd() if given_by_user else None),
        }

    def trial(self, attempt: Attempt, prediction: Prediction | None = None) -> Trial:
        """The trial that an attempt of this request makes; it has just ended."""
        return Trial(
            config=self.config,
            workload=self.job.workload,
            hardware=self.job.hardware,
            stack=self.job.stack,
            memory_limit_bytes=self.memory_limit_bytes,
            outcome=attempt.outcome,
            seconds=attempt.seconds,
            recorded_at=now(),
            prediction=prediction,
            device_state=attempt.device_state,
            node=attempt.node,
        )

    def is_beaten(self, device_bytes: int, step_seconds: float) -> bool:
        """Whether a rival surely beats a step that takes so much: it is no heavier, and faster by a quarter."""
        speed = 1.25 * self.job.workload.tokens_per_step / step_seconds
        return any(r.device_bytes <= device_bytes and r.tokens_per_second >= speed for r in self.rivals)

    def after_waiting(self, seconds: float) -> TrialRequest:
        """The same request, as if it had been made so much later: what it waited for is not part of its trial, but of
        the time that there is for it."""
        asked = None if self.asked is None else (self.asked[0], self.asked[1] + seconds)
        left = max(self.wait_seconds - seconds, 1.0)
        return replace(self, asked=asked, deadline_seconds=min(self.deadline_seconds, left), wait_seconds=left)

    def limit_seconds(self, *, earned: bool) -> float:
        """What the trial may take: more than its allowance only if it has earned that."""
        allowance = self.allowance_seconds
        return self.deadline_seconds if earned or allowance is None else min(self.deadline_seconds, allowance)

    @property
    def most_seconds(self) -> float:
        """How long its child may run: until its deadline, and on for its recordings."""
        records = self.snapshot is not None or self.profile is not None
        return self.deadline_seconds + (RECORDING_SECONDS if records else 0.0)

    @property
    def seconds_since_asked(self) -> float:
        """Seconds since the request was made; 0 if that is not known, or was read from another machine's clock."""
        clock, asked_at = self.asked or ("", 0.0)
        return max(0.0, time.monotonic() - asked_at) if clock == _clock() else 0.0


@cache
def _clock() -> str:
    """What the monotonic clock belongs to: one boot of one machine."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "unknown"
