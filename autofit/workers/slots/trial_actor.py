"""One device's worker on Ray."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from socket import socket
from typing import Any

from autofit import __version__
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.errors import EnvironmentLacks, in_one_line
from autofit.core.lattice import Config
from autofit.techniques import Job
from autofit.training.distributed.rendezvous import LOOPBACK, Rendezvous, listening
from autofit.trial.attempt import Attempt
from autofit.trial.machine import device_lock
from autofit.trial.process.group_runner import when_free
from autofit.trial.process.runner import trial_environment
from autofit.trial.request import TrialRequest


class TrialActor:
    """One device's worker. Its process never touches the device: trials run in children of its fork server. A trial
    runs in one call, and a concurrent call may stop it."""

    def __init__(
        self, device: str, driver: int | None = None, threads: str | None = None, version: str = __version__
    ) -> None:
        """`driver` is the process of this machine to end with, `threads` what OMP_NUM_THREADS says there, and `version`
        that of the driver's autofit."""
        from autofit.workers.watch import end_with

        if driver is not None:
            end_with(driver)
        # Ray sets it to the cores that the worker asks for; what the user has set is part of the hardware.
        os.environ.pop("OMP_NUM_THREADS", None)
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads
        self._device, self._version = device, version
        self._place: dict[str, Any] | None = None
        """Where the ranks of the running trial met: no two trials meet in the same place."""
        self._speaking = threading.Lock()
        self._held = ExitStack()
        """The locks on the devices of the trial of several ranks that met here."""
        self._listener: socket | None = None
        """Where ranks meet that measure what goes between them, if it is here."""
        self._waits_for: int | None = None

    def site(self, measures: bool = False, starts: bool = True) -> dict[str, Any]:
        """Hardware and stack of this worker, as JSON, and if it `measures` also the device's rates, or why these could
        not be measured. To be called before all else: trials can be run from then on. If it `starts`, what they need is
        loaded meanwhile, else before the first of them. Raises `EnvironmentLacks` where they cannot be run."""
        from autofit.trial.machine.detection import detect
        from autofit.trial.process.runner import TrialRunner

        if self._version != __version__:
            raise EnvironmentLacks(
                f"autofit {__version__} is installed there, and {self._version} drives the search",
                remedy="use one image on all nodes, and for the driver",
            )
        hardware, stack = detect(self._device)
        self._kind, self._devices = hardware.kind, device_lock.names(hardware.kind)
        # What an emulated device takes is of no device; and the runner's imports would be measured, too.
        rates = self._measured(hardware, stack) if measures and not hardware.is_emulated else {}
        self._runner = TrialRunner(kind=hardware.kind)
        if starts:
            self._runner.start()
        return {"hardware": hardware.to_json(), "stack": stack.to_json(), **rates}

    def _measured(self, hardware: Hardware, stack: Stack) -> dict[str, Any]:
        from autofit.probe.short import short_probe

        try:
            # Of the `slot.START_SECONDS` that a worker may take to come up.
            with device_lock.held(self._devices, most_seconds=30.0):
                return {"probe": short_probe(hardware, stack).to_json()}
        except Exception as error:  # the comparison is not worth a worker
            return {"unmeasured": in_one_line(error)}

    def end(self) -> None:
        """Never returns: the call fails when the worker ends, which is how others learn of it."""
        threading.Event().wait()

    def address(self) -> str:
        """The address of this worker's machine, for the others in its cluster."""
        import ray

        return str(ray.util.get_node_ip_address())

    def where(self) -> tuple[str, list[str]]:
        """`address`, and what the locks of this worker's devices are called."""
        return self.address(), self._devices

    def waits_for(self) -> int | None:
        """The process whose trial on this device is being waited for, 0 if its number is not known; None if nothing is
        waited for."""
        return self._waits_for

    def lacks(self, config: Config, job: Job) -> str | None:
        """What this worker's machine lacks for `config`, in one sentence; None if nothing."""
        from autofit.training.prerequisites.requirements import missing_requirement

        lacking = missing_requirement(config, job)
        return None if lacking is None else f"on {self.address()}: {lacking}"

    def listen(self, wait_seconds: float, *ranks: tuple[str, list[str]]) -> dict[str, Any]:
        """Open the place on this machine where the next trial's ranks meet, once the devices of those that are on it
        are free; `ranks` are where all of them are, in their order. Other machines' devices are Ray's to share out.
        Raises `GivenUp` after `wait_seconds`."""
        return self._hold(wait_seconds, ranks, self._runner.listen)

    def _hold(
        self, wait_seconds: float, ranks: Sequence[tuple[str, list[str]]], listen: Callable[[str], int]
    ) -> dict[str, Any]:
        """Hold the devices of this machine's `ranks`; where all of them meet, at the port that `listen` opens."""
        addresses = [address for address, _ in ranks]
        on_machine = [device for address, devices in ranks if address == addresses[0] for device in devices]
        self._held.close()
        with ExitStack() as holding:  # until there is a place to meet: without one no trial runs, which would let go
            locks = device_lock.held(on_machine, waiting=self._wait, most_seconds=wait_seconds)
            waited = holding.enter_context(locks)
            self._waits_for = None
            host = LOOPBACK if len(set(addresses)) == 1 else self.address()
            port = listen(host)
            self._held = holding.pop_all()
        return {"host": host, "port": port, "addresses": addresses, "waited": waited}

    def listen_to_measure(self, wait_seconds: float, *ranks: tuple[str, list[str]]) -> dict[str, Any]:
        """As `listen`, for ranks that measure what goes between them."""
        place = self._hold(wait_seconds, ranks, self._listen)
        assert self._listener is not None
        self._held.callback(self._listener.close)
        return place

    def _listen(self, host: str) -> int:
        self._listener = listening(host)
        return int(self._listener.getsockname()[1])

    def between(self, place: dict[str, Any], rank: int) -> dict[str, float] | str:
        """Bytes per second that this rank sends to those that meet in `place`, by collective; or why it cannot."""
        from autofit.probe import ranks

        try:
            environment = trial_environment(self._kind)
            *_, measured = ranks.run(self._kind, {rendezvous_at(place, rank): environment}, self._listener)
            return measured
        except Exception as error:  # which Ray would print for each rank
            return in_one_line(error)
        finally:
            self._held.close()

    def run(self, request: dict[str, Any], place: dict[str, Any] | None = None, rank: int = 0) -> dict[str, Any]:
        """Run one request (in a trial of several ranks, one of them), given as JSON; its attempt, as JSON too."""
        trial = TrialRequest.from_json(request)
        if place is None:
            return when_free(self._devices, trial, self._attempt, waiting=self._wait).to_json()
        trial = replace(trial.after_waiting(place["waited"]), rendezvous=rendezvous_at(place, rank))
        with self._speaking:
            self._place = place
        try:
            return replace(self._runner.attempt(trial), waited_seconds=place["waited"]).to_json()
        finally:
            with self._speaking:
                self._place = None
            self._held.close()

    def _attempt(self, trial: TrialRequest) -> Attempt:
        self._waits_for = None
        return self._runner.attempt(trial)

    def _wait(self, holder: int | None) -> None:
        self._waits_for = holder or 0

    def stop(self, place: dict[str, Any]) -> None:
        """End the trial whose ranks met in `place`, if it still runs here."""
        with self._speaking:
            if self._place == place:
                self._runner.stop()


def rendezvous_at(place: dict[str, Any], rank: int) -> Rendezvous:
    """The rendezvous of one rank at a place that `TrialActor.listen` has opened."""
    addresses = place["addresses"]
    return Rendezvous(
        rank=rank,
        ranks=len(addresses),
        ranks_here=addresses.count(addresses[rank]),
        host=place["host"],
        port=place["port"],
    )
