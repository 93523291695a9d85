"""Room for one trial at a time on Ray: the workers of its ranks, which come up, run trials, and may be lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.probe import Probe
from autofit.core.errors import EnvironmentLacks, lines_of
from autofit.workers.cluster.demand import Demand
from autofit.workers.slots.running_trial import RunningTrial

START_SECONDS = 900.0
"""A worker that has been given its resources and does not answer within this time never will. Loading the libraries may
take `probe.short.LOADING_SECONDS` of it, on a machine that others use."""

Site = tuple[Hardware, Stack]


class StartFailed(EnvironmentLacks):
    """A worker has ended before it could say anything: another may come up in its place."""


class State(Enum):
    """Where a slot stands."""

    PENDING = "pending"
    """Ray has not given it its resources yet, or its workers are starting."""
    IDLE = "idle"
    BUSY = "busy"
    LOST = "lost"
    """A worker has ended, or never answered: the slot is of no more use."""


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """The workers of one trial, whose resources Ray reserves together."""

    demand: Demand
    placement: Any
    """Ray's placement group."""
    actors: list[Any] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    """References to what the workers say of their sites: they are up once all are there."""
    ends: list[Any] = field(default_factory=list)
    """References that only a worker's end resolves."""
    state: State = State.PENDING
    node_ids: tuple[str, ...] = ()
    """The node of each rank; empty until Ray has placed them."""
    at_fault: tuple[str, ...] = ()
    """The nodes of the ranks that have failed; empty where it is not known which have."""
    placed_at: float = 0.0
    site: Site | None = None
    """Its own device and versions; None until it is accepted among the pool's slots."""
    heard: list[Site] = field(default_factory=list)
    """What each rank's worker says of its device and versions; empty until all have answered."""
    probes: list[Probe | None] = field(default_factory=list)
    """Each rank's measured rates; None where it was not asked for them, or could not measure them."""
    unmeasured: str | None = None
    """Why one could not, in one sentence."""
    running: RunningTrial | None = None
    """While it is busy."""
    idle_since: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """Which slot it is; no other ever has the same."""
        return str(self.placement.id.hex())

    @property
    def is_placed(self) -> bool:
        return bool(self.node_ids)

    @property
    def is_up(self) -> bool:
        return self.state in (State.IDLE, State.BUSY)

    def look(self, ray: Any) -> bool:
        """Whether Ray has placed a pending slot since the last look."""
        if self.is_placed:
            return False
        table = ray.util.placement_group_table(self.placement)
        if table.get("state") == "CREATED":
            where = table["bundles_to_node_id"]
            self.node_ids = tuple(where[rank] for rank in range(self.demand.ranks))
            self.placed_at = time.monotonic()
        return self.is_placed

    def blame(self, ray: Any, references: Iterable[Any]) -> None:
        """Note the nodes whose workers have failed to answer their own of `references`, one of each rank; where none
        has failed, those that have not answered."""
        failed, silent = list[str](), list[str]()
        for node, reference in zip(self.node_ids, references, strict=True):
            if not ray.wait([reference], timeout=0)[0]:
                silent.append(node)
                continue
            try:
                ray.get(reference)
            except ray.exceptions.RayError:
                failed.append(node)
        self.at_fault = tuple(failed or silent)

    def hear(self, ray: Any) -> None:
        """Note what the workers have answered, if all have. Raises `EnvironmentLacks` with the reason if one cannot
        run trials or none has answered for too long, and `StartFailed` if one has ended."""
        answered = len(ray.wait(self.answers, num_returns=len(self.answers), timeout=0)[0])
        if answered < len(self.answers):
            if time.monotonic() - self.placed_at > START_SECONDS:
                self.blame(ray, self.answers)
                raise EnvironmentLacks(
                    f"Ray started no worker within {START_SECONDS / 60:.0f} minutes",
                    remedy="check `ray status` and the node's logs",
                )
            return
        try:
            sites = ray.get(self.answers)
        except ray.exceptions.RayError as error:
            self.blame(ray, self.answers)
            if isinstance(lacks := getattr(error, "cause", None), EnvironmentLacks):
                raise lacks from error
            raise StartFailed(
                f"Ray's worker failed: {lines_of(error)[-1]}", remedy="run `autofit doctor` on that machine"
            ) from error
        self.heard = [(Hardware.from_json(s["hardware"]), Stack.from_json(s["stack"])) for s in sites]
        self.probes = [Probe.from_json(s["probe"]) if s.get("probe") else None for s in sites]
        self.unmeasured = next((s["unmeasured"] for s in sites if s.get("unmeasured")), None)

    def accept(self) -> None:
        """The slot may run trials from now on, each under its first rank's device and versions."""
        hardware, stack = self.heard[0]
        if hardware.kind != "cpu":
            # Each worker sees only the device that it was given: what counts is how many ranks share a machine.
            hardware = replace(hardware, count=max(Counter(self.node_ids).values()))
        self.site = hardware, stack
        self.free()

    def free(self) -> None:
        self.running, self.state, self.idle_since = None, State.IDLE, time.monotonic()

    def end(self, ray: Any) -> None:
        """Kill the workers and give back their resources. A trial's processes end with their worker, because its pipe
        closes."""
        self.state = State.LOST
        for actor in self.actors:
            with suppress(Exception):  # it may be gone already
                ray.kill(actor)
        with suppress(Exception):
            ray.util.remove_placement_group(self.placement)
