"""An NVIDIA card while a trial runs on it, observed through NVML from outside the trial's process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from statistics import fmean
from typing import Any, TypeVar

from autofit.core.device.state import CardState
from autofit.trial.machine import nvml

T = TypeVar("T")
UNCORRECTED, SINCE_BOOT = 1, 0
"""nvmlMemoryErrorType_t and nvmlEccCounterType_t (nvml.h)."""
SM = 1
"""nvmlClockType_t."""


@dataclass(slots=True)
class CardWatch:
    """The first visible card, from its creation on; observes nothing where there is no NVML. Used from one thread."""

    process: int
    """The trial's process."""
    others_bytes: int | None
    """Bytes of the card's memory that others held before the trial began."""
    _limits: CardState | None = field(init=False, default=None)
    """The values that do not change while a trial runs."""
    _samples: list[CardState] = field(init=False, default_factory=list)
    _errors_before: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        with suppress(nvml.Unreachable), nvml.first_card() as card:
            self._limits = CardState(
                uuid=card.uuid,
                sm_clock_max_mhz=card.ask("nvmlDeviceGetMaxClockInfo", SM),
                power_limit_watts=_watts(card.ask("nvmlDeviceGetPowerManagementLimit")),
                power_limit_default_watts=_watts(card.ask("nvmlDeviceGetPowerManagementDefaultLimit")),
                others_bytes=self.others_bytes,
            )
            self._errors_before = card.ask("nvmlDeviceGetTotalEccErrors", UNCORRECTED, SINCE_BOOT)

    def look(self) -> None:
        """Sample the card's clocks, and all else that changes from moment to moment."""
        if self._limits is None:
            return
        with suppress(nvml.Unreachable), nvml.first_card() as card:
            errors = card.ask("nvmlDeviceGetTotalEccErrors", UNCORRECTED, SINCE_BOOT)
            before = self._errors_before
            self._samples.append(
                CardState(
                    uuid=card.uuid,
                    sm_clock_mhz=card.ask("nvmlDeviceGetClockInfo", SM),
                    throttle_mask=card.ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
                    others_share=self._others_share(card),
                    memory_errors=None if errors is None or before is None else errors - before,
                )
            )

    def state(self) -> CardState | None:
        """All samples condensed into one; None where NVML did not answer."""
        if self._limits is None or not self._samples:
            return self._limits
        # When something held the clock down while the card worked; bit 0x1 says that nothing ran
        # (nvmlClocksEventReasonGpuIdle).
        held_down = [sample for sample in self._samples if (sample.throttle_mask or 0) & ~0x1]
        return replace(
            self._limits,
            sm_clock_mhz=_condensed(held_down or self._samples, "sm_clock_mhz", min),
            throttle_mask=_condensed(self._samples, "throttle_mask", lambda masks: reduce(or_, masks)),
            others_share=_condensed(self._samples, "others_share", fmean),
            memory_errors=_condensed(self._samples, "memory_errors", max),
        )

    def _others_share(self, card: nvml.OpenCard) -> float | None:
        """The share of the multiprocessors' time that other processes used in the last sixth of a second or so. One
        whose last sample is a second older than another's is no longer at work. None where the driver has other
        process numbers, as in most containers."""
        running = card.ask("nvmlDeviceGetComputeRunningProcesses") or ()
        samples = card.ask("nvmlDeviceGetProcessUtilization", 0)
        if samples is None or self.process not in {process.pid for process in running}:
            return None
        latest: dict[int, Any] = {}
        for sample in samples:
            if sample.pid not in latest or sample.timeStamp > latest[sample.pid].timeStamp:
                latest[sample.pid] = sample
        newest = max((sample.timeStamp for sample in latest.values()), default=0)
        recent = (s for pid, s in latest.items() if pid != self.process and newest - s.timeStamp < 1e6)
        return float(min(1.0, sum(sample.smUtil for sample in recent) / 100))


def _condensed(samples: Sequence[CardState], name: str, condense: Callable[[list[Any]], T]) -> T | None:
    values = [value for sample in samples if (value := getattr(sample, name)) is not None]
    return condense(values) if values else None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
