"""Observes a trial's device while the trial is timed, from the process that runs the trial."""

from __future__ import annotations

import time

from autofit.core.device.hardware import Hardware
from autofit.core.device.state import DeviceState
from autofit.training.distributed.rendezvous import Rendezvous
from autofit.trial.machine import processor
from autofit.trial.machine.card import CardWatch
from autofit.trial.machine.detection import threads


class DeviceWatch:
    """Observes the device of one trial: from the beginning of its timed part to that part's end or, if that has not
    come, from the trial's beginning to its end. Used from one thread.

    The kernel's counters are read at each end, which takes a few milliseconds.
    """

    def __init__(
        self, hardware: Hardware, process: int, others_bytes: int | None, rendezvous: Rendezvous | None = None
    ) -> None:
        """For a trial whose `process` leads a session of its own; `others_bytes` is what others held of the card's
        memory before it began, None on the CPU and where it is not known."""
        ranks_here = 1 if rendezvous is None else rendezvous.ranks_here
        self._process, self._others_bytes = process, others_bytes
        self._on_cpu = hardware.kind == "cpu"
        self._threads = max(1, (hardware.cores or threads()) // ranks_here)
        self._is_timing = self._is_over = False
        self._begin()

    def _begin(self) -> None:
        self._since = self._until = self._looked = time.monotonic()
        self._before = self._after = processor.read(self._process)
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
            self._after = processor.read(self._process)

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
