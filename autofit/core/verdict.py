"""What several attempts of one config mean together: the one verdict, of searches as of the store.

Attempts of a config are its trials on one hardware and stack and of one workload, oldest first. They may contradict
each other: the config fitted, but also ran out of memory under a limit that would have held it. Another process may
have held memory at the time, the config may briefly need more than it is observed to hold, or it may fit only by luck.
This cannot be told afterwards, so the conservative reading is used everywhere: for limits up to the one under which it
ran out, the config counts as out of memory until enough trials have shown otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from autofit.core.outcome import (
    DEADLINE_SECONDS,
    Crashed,
    Diverged,
    Fits,
    Measurement,
    Outcome,
    OutOfMemory,
    TimedOut,
    Trial,
    Unsupported,
    machinery_failed,
)

MENDS = "run them again under that limit, with `autofit trial` twice or `autofit search --fresh`"
"""How to get a sound result for a config with contradictory ones."""


def verdict(
    attempts: Sequence[Trial], memory_limit_bytes: int, deadline_seconds: float = DEADLINE_SECONDS
) -> Trial | None:
    """The attempt that settles a config under a limit; None if the config must be run.

    A trial that fitted under any limit settles every limit that holds its memory. One that ran out of memory settles
    every limit no higher than its own, a divergence every limit. A crash or a time-out settles its own limit only, and
    a time-out only deadlines no longer than its own. A failure of the machinery settles nothing, nor does a crash of a
    user's own program. Running out of host memory settles nothing either, but what fitted before it must show that
    again.

    The latest trial counts. But a time-out sooner than usual, which may have had no time to end, gives way to a fit;
    one that was stopped early to one that was timed in full; and one whose time is in doubt (`Trial.doubts`) to one
    whose time is not. One that is set aside settles nothing. Where one ran out of device memory, a fit counts only once
    that is disproved (`ran_out`).
    """
    settling = list(_settling(attempts, memory_limit_bytes, deadline_seconds))
    telling = (trial for trial in settling if not _is_hurried(trial.outcome))
    fits = list(takewhile(lambda trial: isinstance(trial.outcome, Fits), telling))  # those since the last failure
    if fits:
        return max(fits, key=lambda trial: (trial.timed_in_full and not trial.doubts, trial.timed_in_full))
    return settling[0] if settling else None


def _is_hurried(outcome: Outcome) -> bool:
    return isinstance(outcome, TimedOut) and outcome.deadline_seconds < DEADLINE_SECONDS


def _settling(attempts: Sequence[Trial], memory_limit_bytes: int, deadline_seconds: float) -> Iterator[Trial]:
    """The attempts that settle the config, the latest first."""
    refuted = bool(ran_out(attempts, memory_limit_bytes))
    for trial in reversed(attempts):
        if isinstance(trial.outcome, OutOfMemory) and trial.memory_limit_bytes >= memory_limit_bytes:
            refuted = True  # of the host's memory, too
        is_refuted = refuted and trial.fits_within(memory_limit_bytes)
        if _settles_alone(trial, memory_limit_bytes, deadline_seconds) and not is_refuted:
            yield trial


def standing(attempts: Sequence[Trial], memory_limit_bytes: int = 0) -> Trial | None:
    """The attempt by which a frontier knows a config: the one that settles it within the limit, else the one that
    settles it under the most memory that any attempt had; None if it knows none."""
    if len(attempts) == 1:  # as most configs have, and as the rest of this says at ten times the cost
        return attempts[0] if isinstance(attempts[0].outcome, Fits) and not attempts[0].why_set_aside else None
    within = verdict(attempts, memory_limit_bytes)
    if within is not None and within.fits_within(memory_limit_bytes):
        return within
    beyond = verdict(attempts, most_memory(attempts))
    takes_more = beyond is not None and beyond.measurement is not None and not beyond.fits_within(memory_limit_bytes)
    return beyond if takes_more else None


def most_memory(attempts: Sequence[Trial]) -> int:
    """The most bytes of device memory that any attempt was given or, where more, took."""
    taken = (m.device_bytes for t in attempts if (m := t.measurement))
    return max((*taken, *(t.memory_limit_bytes for t in attempts)))


def ran_out(attempts: Sequence[Trial], memory_limit_bytes: int = 0) -> tuple[Trial, ...]:
    """The attempts that ran out of device memory under the limit or a higher one, and still count.

    A failure no longer counts once two later trials, as many as a winner needs, have fitted under its limit or a lower
    one, timed in full.
    """
    return tuple(
        trial
        for number, trial in enumerate(attempts, start=1)
        if trial.ran_out_on_device
        and trial.memory_limit_bytes >= memory_limit_bytes
        and sum(t.timed_in_full and t.memory_limit_bytes <= trial.memory_limit_bytes for t in attempts[number:]) < 2
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """The attempts of one config that contradict each other."""

    fitted: tuple[Trial, ...]
    """Trials that took no more memory than the limit of one in `ran_out`."""
    ran_out: tuple[Trial, ...]
    """Trials that ran out of device memory and have not been disproved by later ones."""

    @property
    def measured(self) -> tuple[tuple[Trial, Measurement], ...]:
        """The `fitted` trials, each with its measurement."""
        return tuple((t, m) for t in self.fitted if (m := t.measurement))

    def to_json(self) -> dict[str, Any]:
        trial = self.fitted[0]
        return {
            "config": trial.config.to_json(),
            "hardware": trial.hardware.name,
            "workload": trial.workload.to_json(),
            "fits": [
                {"trial_id": t.trial_id, "device_bytes": m.device_bytes, "memory_limit_bytes": t.memory_limit_bytes}
                for t, m in self.measured
            ],
            "out_of_memory": [
                {"trial_id": t.trial_id, "memory_limit_bytes": t.memory_limit_bytes} for t in self.ran_out
            ],
        }


def contradiction(attempts: Sequence[Trial], memory_limit_bytes: int | None = None) -> Contradiction | None:
    """The contradiction among the attempts under a limit or, if that is None, under any; None if there is none."""
    failed = ran_out(attempts, memory_limit_bytes or 0)
    if not failed:
        return None
    most = max(t.memory_limit_bytes for t in failed) if memory_limit_bytes is None else memory_limit_bytes
    fitted = tuple(t for t in attempts if t.fits_within(most))
    return Contradiction(fitted=fitted, ran_out=failed) if fitted else None


def in_words(contradictory: int) -> str:
    """One line that says how configs with contradictory results are treated, and how to resolve them."""
    single = contradictory == 1
    return (
        f"{contradictory} {'config has' if single else 'configs have'} contradictory results (fitted, and ran out of "
        f"memory under a limit that held {'it' if single else 'them'}) and {'counts' if single else 'count'} as out of "
        f"memory; `autofit db check` lists the trials; to resolve this, {MENDS}"
    )


def _settles_alone(trial: Trial, memory_limit_bytes: int, deadline_seconds: float) -> bool:
    outcome = trial.outcome
    if trial.why_set_aside:
        return False
    if isinstance(outcome, Fits):
        return trial.fits_within(memory_limit_bytes) or outcome.measurement.peak_allocated_bytes > memory_limit_bytes
    if isinstance(outcome, OutOfMemory):
        return trial.memory_limit_bytes >= memory_limit_bytes and trial.ran_out_on_device
    if isinstance(outcome, Unsupported) or machinery_failed(outcome):
        return False  # what the machine lacked may be there next time
    if isinstance(outcome, Crashed) and trial.workload.program is not None:
        return False  # a user's program may be mended under the same command
    if isinstance(outcome, TimedOut) and (outcome.deadline_seconds < deadline_seconds or trial.doubts):
        return False  # with more time, or the device to itself, it may end
    if isinstance(outcome, Diverged):
        return True  # no memory limit makes it train
    return trial.memory_limit_bytes == memory_limit_bytes
