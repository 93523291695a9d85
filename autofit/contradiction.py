"""Contradictory trials of one config: it fitted, but also ran out of memory under a limit that would have held it.

Another process may have held memory at the time, the config may briefly need more than it is observed to hold, or it
may fit only by luck. This cannot be told afterwards, so the conservative reading is used everywhere: for limits up to
the one under which it ran out, the config counts as out of memory until enough trials have shown otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autofit.outcome import Fits, Measurement, OutOfMemory, Trial

FITS_TO_DISPROVE = 2
"""Trials that must fit after one that ran out of memory before it no longer counts: as many as a winner needs."""
MENDS = "run them again under that limit, with `autofit trial` twice or `autofit search --fresh`"
"""How to get a sound result for a config with contradictory ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """The trials of one config, on one hardware and stack and of one workload, that contradict each other."""

    fitted: tuple[Trial, ...]
    """Trials that took no more memory than the limit of one in `ran_out`."""
    ran_out: tuple[Trial, ...]
    """Trials that ran out of device memory and have not been disproved by later ones."""

    @property
    def measured(self) -> tuple[tuple[Trial, Measurement], ...]:
        """The `fitted` trials, each with its measurement."""
        return tuple((t, t.outcome.measurement) for t in self.fitted if isinstance(t.outcome, Fits))

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        one = self.fitted[0]
        return {
            "config": one.config.to_json(),
            "hardware": one.hardware.name,
            "workload": one.workload.to_json(),
            "fits": [
                {"trial_id": t.trial_id, "device_bytes": m.device_bytes, "memory_limit_bytes": t.memory_limit_bytes}
                for t, m in self.measured
            ],
            "out_of_memory": [
                {"trial_id": t.trial_id, "memory_limit_bytes": t.memory_limit_bytes} for t in self.ran_out
            ],
        }


def ran_out(attempts: Sequence[Trial], memory_limit_bytes: int = 0) -> tuple[Trial, ...]:
    """The trials of one config that ran out of device memory under the limit or a higher one, and still count.

    `attempts`: all trials of the config, oldest first. A failure no longer counts once `FITS_TO_DISPROVE` later trials
    have fitted under its limit or a lower one, timed in full.
    """
    return tuple(
        trial
        for number, trial in enumerate(attempts)
        if isinstance(trial.outcome, OutOfMemory)
        and not trial.outcome.host
        and trial.memory_limit_bytes >= memory_limit_bytes
        and sum(_fits_in_full(later, trial) for later in attempts[number + 1 :]) < FITS_TO_DISPROVE
    )


def contradiction(attempts: Sequence[Trial], memory_limit_bytes: int | None = None) -> Contradiction | None:
    """The contradiction among `attempts`, all trials of one config, oldest first; None if there is none.

    The question is about `memory_limit_bytes` or, if that is None, about any limit.
    """
    failed = ran_out(attempts, memory_limit_bytes or 0)
    if not failed:
        return None
    most = max(t.memory_limit_bytes for t in failed) if memory_limit_bytes is None else memory_limit_bytes
    fitted = tuple(t for t in attempts if isinstance(t.outcome, Fits) and _taken(t) <= most)
    return Contradiction(fitted=fitted, ran_out=failed) if fitted else None


def in_words(contradictory: int) -> str:
    """One line that says how configs with contradictory results are treated, and how to resolve them."""
    one = contradictory == 1
    return (
        f"{contradictory} {'config has' if one else 'configs have'} contradictory results (fitted, and ran out of "
        f"memory under a limit that held {'it' if one else 'them'}) and {'counts' if one else 'count'} as out of "
        f"memory; `autofit db check` lists the trials; to resolve this, {MENDS}"
    )


def _fits_in_full(trial: Trial, failed: Trial) -> bool:
    """Whether the trial fitted and was timed in full, under a limit no higher than the failed one's."""
    if not isinstance(trial.outcome, Fits) or trial.outcome.measurement.stopped_early:
        return False
    return trial.memory_limit_bytes <= failed.memory_limit_bytes


def _taken(trial: Trial) -> int:
    assert isinstance(trial.outcome, Fits)
    return trial.outcome.measurement.device_bytes
