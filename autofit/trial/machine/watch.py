"""Observes a trial's device while the trial is timed, from the process that runs the trial."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from operator import or_
from statistics import fmean
from typing import Any, TypeVar

from autofit.core.device.hardware import Hardware
from autofit.core.device.state import CardState, DeviceState
from autofit.training.distributed.rendezvous import Rendezvous
from autofit.trial.machine import nvml, processor
from autofit.trial.machine.cores import hardware_threads, threads

T = TypeVar("T")
UNCORRECTED, SINCE_BOOT = 1, 0
"""nvmlMemoryErrorType_t and nvmlEccCounterType_t (nvml.h)."""
SM = 1
"""nvmlClockType_t."""


class DeviceWatch:
    """Observes the device of one trial: from the beginning of its timed part to that part's end or, if that has not
    come, from the trial's beginning to its end. Used from one thread.

    The kernel's counters are read at each end, which takes a few milliseconds.
    """

    def __init__(
        self,
        hardware: Hardware,
        process: int,
        others_bytes: int | None,
        rendezvous: Rendezvous | None = None,
        *,
        session: int | None = None,
    ) -> None:
        """For a trial whose `process` leads a session of its own, or is in the one of that number; `others_bytes` is
        what others held of the card's memory before it began, None on the CPU and where it is not known."""
        ranks_here = 1 if rendezvous is None else rendezvous.ranks_here
        self._process, self._others_bytes = process, others_bytes
        self._session = process if session is None else session
        self._on_cpu = hardware.kind == "cpu"
        self._threads = hardware_threads(max(1, (hardware.cores or threads()) // ranks_here))
        self._is_timing = self._is_over = False
        self._begin()

    def _begin(self) -> None:
        self._since = self._until = self._looked = time.monotonic()
        self._before = self._after = processor.read(self._session)
        self._card = None if self._on_cpu else CardWatch(self._process, self._others_bytes)

    def follow(self, is_timing: bool) -> None:
        """Take note of whether the trial is in its timed part, and look at the card twice a second: its clock and its
        reasons are those of the moment."""
        if self._is_over:
            return
        if is_timing and not self._is_timing:
            self._is_timing = True
            self._begin()
            self._look()  # the steps before have left it at work
        elif self._is_timing and not is_timing:
            self.end()
        elif time.monotonic() - self._looked >= 0.5:
            self._look()

    def end(self) -> None:
        """Stop observing. To be called before the trial's process is waited for: the kernel then forgets what that has
        used."""
        if not self._is_over:
            self._is_over = True
            self._until = time.monotonic()
            self._after = processor.read(self._session)

    def state(self) -> DeviceState:
        card = None if self._card is None else self._card.state()
        was_read = self._before is not None and self._after is not None
        return DeviceState(
            seconds=self._until - self._since,
            processor=processor.between(self._before, self._after, self._threads) if was_read else None,  # type: ignore[arg-type]
            cards=() if card is None else (card,),
        )

    def _look(self) -> None:
        self._looked = time.monotonic()
        if self._card is not None:
            self._card.look()


class CardWatch:
    """Observes the first visible card; nothing where there is no NVML. Used from one thread."""

    def __init__(self, process: int, others_bytes: int | None) -> None:
        """For the trial of that `process`; `others_bytes` of the card's memory were held by others before it began."""
        self._process = process
        self._limits: CardState | None = None
        """The values that do not change while a trial runs."""
        self._samples: list[CardState] = []
        self._errors_before: int | None = None
        with suppress(nvml.Unreachable), nvml.first_card() as card:
            self._limits = CardState(
                uuid=card.uuid,
                sm_clock_max_mhz=card.ask("nvmlDeviceGetMaxClockInfo", SM),
                power_limit_watts=_watts(card.ask("nvmlDeviceGetPowerManagementLimit")),
                power_limit_default_watts=_watts(card.ask("nvmlDeviceGetPowerManagementDefaultLimit")),
                others_bytes=others_bytes,
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
        if samples is None or self._process not in {process.pid for process in running}:
            return None
        latest: dict[int, Any] = {}
        for sample in samples:
            if sample.pid not in latest or sample.timeStamp > latest[sample.pid].timeStamp:
                latest[sample.pid] = sample
        newest = max((sample.timeStamp for sample in latest.values()), default=0)
        recent = (s for pid, s in latest.items() if pid != self._process and newest - s.timeStamp < 1e6)
        return float(min(1.0, sum(sample.smUtil for sample in recent) / 100))


def _condensed(samples: Sequence[CardState], name: str, condense: Callable[[list[Any]], T]) -> T | None:
    values = [value for sample in samples if (value := getattr(sample, name)) is not None]
    return condense(values) if values else None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
