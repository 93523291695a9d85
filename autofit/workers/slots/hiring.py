"""Asks Ray for the workers of slots, which bear the name of their search, and ends those of its earlier drivers."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from autofit.workers.cluster.demand import Demand
from autofit.workers.slots.slot import Slot, State
from autofit.workers.slots.trial_actor import TrialActor

NAMESPACE = "autofit"
"""Ray's namespace of the workers' names, for all drivers of a cluster."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A driver of a search: who has a higher epoch of the same search has taken it over."""

    search_id: str
    epoch: int

    def new_name(self) -> str:
        return f"{self.search_id}/{self.epoch}/{uuid4().hex[:8]}"

    def supersedes(self, name: str) -> bool:
        """Whether a worker of this name belongs to an earlier driver of the same search."""
        search_id, _, rest = name.partition("/")
        epoch = rest.partition("/")[0]
        return search_id == self.search_id and epoch.isdecimal() and int(epoch) < self.epoch


@dataclass(slots=True, kw_only=True)
class Hiring:
    """Asks for workers on behalf of one pool."""

    ray: Any
    device: str
    """What kind of device they are to find: `auto`, `cpu` or `cuda`."""
    driver: int | None
    """The process of this machine that they end with; None in a cluster, where the driver may be on another machine and
    Ray itself ends a lost driver's workers."""
    owner: Owner | None = None
    """None before the search is known: its workers have no name yet."""

    def slot(self, demand: Demand) -> Slot:
        """The workers of one trial, which come up when Ray has their resources."""
        placement = self.ray.util.placement_group(
            [_without_zeros(demand) for _ in range(demand.ranks)],
            strategy=demand.strategy,
            bundle_label_selector=[dict(demand.selector) for _ in range(demand.ranks)] if demand.selector else None,
        )
        slot = Slot(demand=demand, placement=placement)
        self._hire(slot)
        return slot

    def hire_anew(self, slot: Slot) -> None:
        """Replace the workers of a slot that runs nothing; its resources stay reserved meanwhile."""
        for actor in slot.actors:
            with suppress(Exception):  # it may be gone already
                self.ray.kill(actor)
        self._hire(slot)
        slot.state, slot.heard, slot.placed_at = State.PENDING, [], time.monotonic()

    def end_predecessors(self) -> None:
        """End the workers of earlier drivers of the search, which may still run trials: they would take time and memory
        from those of this one. Their trials are stored by nobody."""
        assert self.owner is not None
        for actor in self.ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] == NAMESPACE and self.owner.supersedes(actor["name"]):
                _log.info("autofit: ending worker %s of an earlier driver", actor["name"])
                with suppress(ValueError):  # it has ended since it was listed
                    self.ray.kill(self.ray.get_actor(actor["name"], namespace=NAMESPACE))

    def _hire(self, slot: Slot) -> None:
        slot.actors = [self._worker(slot, rank) for rank in range(slot.demand.ranks)]
        # What comes up before the search is known is replaced before its first trial. Ranks on a CPU share its cores,
        # and would measure each other.
        measures = self.owner is not None and (slot.demand.ranks == 1 or "GPU" in slot.demand.bundle)
        slot.answers = [actor.site.remote(measures) for actor in slot.actors]
        slot.ends = [actor.end.remote() for actor in slot.actors]

    def _worker(self, slot: Slot, rank: int) -> Any:
        place = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        bundle = _without_zeros(slot.demand)
        name_options = {} if self.owner is None else {"name": self.owner.new_name(), "namespace": NAMESPACE}
        # What the user has set for this machine is no business of another.
        threads = None if self.driver is None else os.environ.get("OMP_NUM_THREADS")
        worker = self.ray.remote(TrialActor).options(
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,  # a trial, what stops it, what asks what it waits for, and what shows the worker's end
            num_cpus=slot.demand.bundle["CPU"],
            num_gpus=slot.demand.bundle.get("GPU", 0),
            resources={name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")},
            scheduling_strategy=place(slot.placement, placement_group_bundle_index=rank),
            **name_options,
        )
        return worker.remote(self.device, self.driver, threads)


def _without_zeros(demand: Demand) -> dict[str, float]:
    """A rank's resources as Ray takes them."""
    return {name: amount for name, amount in demand.bundle.items() if amount}
