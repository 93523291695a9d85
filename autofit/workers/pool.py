"""The interface through which a search runs its trials."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.probe import Probe, ProbePart
from autofit.core.lattice import Config
from autofit.techniques import Job
from autofit.trial.attempt import Attempt
from autofit.trial.request import TrialRequest

Completed = tuple[TrialRequest, Attempt]
"""A request as it was run, with the hardware and stack of the worker that ran it, and what that has given."""


class Pool(ABC):
    """Runs trials on one or more devices of one kind. Used from one thread.

    A trial's failure is an outcome, never an exception; an exception means that the pool itself cannot go on. What is
    not abstract here is as in a pool that has its workers to itself, and none that could be left out.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """Trials that may be under way at the same time, one per device or per group of devices. Where devices come and
        go, it changes, and may be 0 for a while."""

    @abstractmethod
    def site(self) -> tuple[Hardware, Stack]:
        """The device and the library versions that trials will meet."""

    @abstractmethod
    def cannot(self, config: Config, job: Job) -> str | None:
        """Why `config` cannot be trained for `job` where the trials run, in one sentence; None where it can."""

    @property
    def set_aside(self) -> Mapping[str, str]:
        """Workers (`Attempt.worker`) whose device has turned out to be clearly slower than its type, each with why in a
        sentence: what the trials that they have run, or still run, show of time is of no use."""
        return MappingProxyType({})

    def leave_out(self, worker: str, reason: str) -> bool:
        """Give a worker (`Attempt.worker`) whose machinery fails no more trials, and start no other on its machine;
        returns whether it gets none. False, and nothing is changed, where no other worker is up or starting."""
        return False

    def claim(self, search_id: str, epoch: int, usual: Probe | None = None) -> None:  # noqa: B027 (nothing to end)
        """The trials are of this search from now on, and of its driver with this epoch; what earlier drivers of it have
        left running elsewhere is ended. To be called before the first trial, where the pool outlives this process.
        `usual`: what the store knows of such a device's rates, with which those of the workers are compared."""

    def link(self) -> ProbePart | None:
        """What a trial's ranks send each other where they are on several machines, measured now
        (`core.device.probe.between`), or why that failed; None where they share one. To be called while no trial runs.
        """
        return None

    @abstractmethod
    def submit(self, request: TrialRequest) -> None:
        """Start `request` on an idle worker, or on the next one that is."""

    @abstractmethod
    def wait(self, timeout: float) -> list[Completed]:
        """The trials that ended within `timeout` seconds; possibly none. A trial whose worker was lost has ended, too:
        who asked for it decides whether it is run again."""

    @abstractmethod
    def close(self) -> None:
        """Kill whatever runs and free the workers."""
