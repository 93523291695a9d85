"""Combines the answers of one trial's ranks into one outcome: the cause of a failure, not its consequences."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autofit.core.device.state import together
from autofit.core.outcome import Crashed, Fits, Measurement, Outcome, OutOfMemory, TimedOut
from autofit.trial.attempt import Attempt
from autofit.trial.process.classify import STOPPED

GRACE_SECONDS = 2.0
"""How long the other ranks may go on after one has failed, to report failures of their own."""
_PEER_IS_GONE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|gloo/transport|remote peer|recv(ing)?value failed"
    r"|the ranks cannot meet|nccl|tcpstore|distnetworkerror|diststoreerror|distbackenderror",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL and torch's store when the process at the other end is gone."""


@dataclass(slots=True, kw_only=True)
class GroupAnswers:
    """The answers of one trial's ranks so far."""

    ranks: int
    _attempts: dict[int, Attempt] = field(default_factory=dict)
    """In order of arrival."""
    _failed_at: float | None = None
    _named: bool = False

    def take(self, rank: int, attempt: Attempt) -> None:
        self._attempts[rank] = attempt
        if not isinstance(attempt.outcome, Fits) and self._failed_at is None:
            self._failed_at = time.monotonic()

    @property
    def complete(self) -> bool:
        return len(self._attempts) == self.ranks

    @property
    def grace_left(self) -> float | None:
        """Seconds until the unanswered ranks are overdue; None while none has failed, and once they have been named."""
        if self._failed_at is None or self._named:
            return None
        return max(0.0, self._failed_at + GRACE_SECONDS - time.monotonic())

    def overdue(self) -> list[int]:
        """The ranks to stop now, because another failed `GRACE_SECONDS` ago. Each is named once."""
        if self.grace_left != 0.0:
            return []
        self._named = True
        return [rank for rank in range(self.ranks) if rank not in self._attempts]

    def attempt(self) -> Attempt:
        """What all of them come to together."""
        in_order = [self._attempts[rank] for rank in sorted(self._attempts)]
        return Attempt(
            outcome=combined({rank: attempt.outcome for rank, attempt in self._attempts.items()}),
            seconds=max(attempt.seconds for attempt in in_order),
            device_state=together([attempt.device_state for attempt in in_order]),
            node=in_order[0].node,
        )


def combined(answers: Mapping[int, Outcome]) -> Outcome:
    """One outcome from those of the ranks, keyed by rank in order of arrival: `Fits` if all fit, or the first cause."""
    if len(answers) == 1:
        (only,) = answers.values()
        return only
    fits = {rank: outcome.measurement for rank, outcome in answers.items() if isinstance(outcome, Fits)}
    if len(fits) == len(answers):
        return Fits(measurement=_together([fits[rank] for rank in sorted(fits)]))
    failures = {rank: outcome for rank, outcome in answers.items() if not isinstance(outcome, Fits)}
    late = {rank: outcome for rank, outcome in failures.items() if isinstance(outcome, TimedOut)}
    cause = min(failures, key=lambda rank: _distance(failures[rank]))
    if cause in late:
        return _hung(late, failures)
    failure = failures[cause]
    reason = f"rank {cause}: {failure.reason}"
    if isinstance(failure, Crashed) and _distance(failure) > 2:
        return replace(failure, reason=reason, transient=True)  # the connection failed, not a rank
    return replace(failure, reason=reason)


def _distance(outcome: Outcome) -> int:
    """How far an outcome is from the cause of its group's failure.

    Out of memory comes first: it may look like anything else to the other ranks, and nothing else looks like it.
    """
    if isinstance(outcome, OutOfMemory):
        return 0
    if isinstance(outcome, TimedOut):
        return 2
    if not isinstance(outcome, Crashed):
        return 1
    if outcome.reason.startswith(STOPPED):
        return 4
    # NCCL ends a process that it gives up on, and with torch 2.11 gloo can, too: then the reason is only how it ended.
    ended = outcome.signal is not None or outcome.exit_code is not None
    message = outcome.stderr_tail if ended else outcome.reason
    return 3 if _PEER_IS_GONE.search(message) else 1


def _hung(late: Mapping[int, TimedOut], failures: Mapping[int, Outcome]) -> TimedOut:
    """The outcome of ranks that timed out: those that got least far hang, and the others wait for them."""
    fewest = min(outcome.phases_entered for outcome in late.values())
    hanging = sorted(rank for rank, outcome in late.items() if outcome.phases_entered == fewest)
    waiting = sorted(rank for rank in failures if rank not in hanging)
    reason = "; ".join(f"rank {rank}: {late[rank].reason}" for rank in hanging)
    if waiting:
        ranks = f"rank{'s' if len(waiting) > 1 else ''} {', '.join(map(str, waiting))}"
        phases = sorted({getattr(failures[rank], "phase", None) or "start" for rank in waiting})
        reason += f" ({ranks} waiting in phase {', '.join(phases)})"
    return replace(late[hanging[0]], reason=reason)


def _together(ranks: Sequence[Measurement]) -> Measurement:
    """The group's measurement: the most memory of any rank, the time of the slowest."""

    def most(name: str) -> Any:
        return max(getattr(rank, name) for rank in ranks)

    largest_process = max(ranks, key=lambda rank: rank.host_peak_bytes)
    slowest = max(ranks, key=lambda rank: rank.step_seconds.median)
    return replace(
        slowest,
        peak_allocated_bytes=most("peak_allocated_bytes"),
        peak_reserved_bytes=most("peak_reserved_bytes"),
        device_bytes=most("device_bytes"),
        setup_peak_bytes=most("setup_peak_bytes"),
        host_peak_bytes=largest_process.host_peak_bytes,
        host_baseline_bytes=largest_process.host_baseline_bytes,
        phase_peaks={phase: max(rank.phase_peaks[phase] for rank in ranks) for phase in slowest.phase_peaks},
        leak_bytes_per_step=most("leak_bytes_per_step"),
        setup_seconds=most("setup_seconds"),
        overhead_seconds=most("overhead_seconds"),
        ranks=tuple(figures for rank in ranks for figures in rank.ranks),
    )
