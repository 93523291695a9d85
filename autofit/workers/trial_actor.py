"""One device's worker on Ray."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from autofit.lattice import Config
from autofit.rendezvous import LOOPBACK, Rendezvous
from autofit.techniques import Job
from autofit.trial.request import TrialRequest


class TrialActor:
    """One device's worker. The actor's process never touches the device: trials run in children of its warm parent.

    A trial runs in one call, and a concurrent call may stop it.
    """

    def __init__(self, device: str, driver: int | None = None) -> None:
        from autofit.trial.runner import TrialRunner
        from autofit.trial.site import detect
        from autofit.workers.watch import end_with

        if driver is not None:
            end_with(driver)
        self._hardware, self._stack = detect(device)
        self._runner = TrialRunner(kind=self._hardware.kind)
        self._runner.start()
        self._place: dict[str, Any] | None = None
        """Where the ranks of the running trial met: no two trials meet in the same place."""
        self._speaking = threading.Lock()

    def site(self) -> dict[str, Any]:
        """Hardware and stack of this worker, as JSON."""
        return {"hardware": self._hardware.to_json(), "stack": self._stack.to_json()}

    def address(self) -> str:
        """The address of this worker's machine, for the others in its cluster."""
        import ray

        return str(ray.util.get_node_ip_address())

    def lacks(self, config: Config, job: Job) -> str | None:
        """What this worker's machine lacks for `config`, in one sentence; None if nothing."""
        from autofit.training.requirements import lacking_here

        lacking = lacking_here(config, job)
        return None if lacking is None else f"on {self.address()}: {lacking}"

    def listen(self, *addresses: str) -> dict[str, Any]:
        """Open the place on this machine where the next trial's ranks meet; `addresses` are those of all ranks, in
        their order."""
        host = LOOPBACK if len(set(addresses)) == 1 else self.address()
        return {"host": host, "port": self._runner.listen(host), "addresses": list(addresses)}

    def run(self, request: dict[str, Any], place: dict[str, Any] | None = None, rank: int = 0) -> dict[str, Any]:
        """Run one request (in a trial of several ranks, one of them), given as JSON; its outcome and seconds."""
        from autofit.outcome import outcome_to_json

        asked = TrialRequest.from_json(request)
        if place is not None:
            asked = replace(asked, rendezvous=rendezvous_at(place, rank))
        with self._speaking:
            self._place = place
        try:
            outcome, seconds = self._runner.run(asked)
        finally:
            with self._speaking:
                self._place = None
        return {"outcome": outcome_to_json(outcome), "seconds": seconds}

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
