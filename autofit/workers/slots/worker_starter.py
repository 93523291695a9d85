"""Asks Ray for the workers of slots, which bear the name of their search, and ends those of its earlier drivers."""

from __future__ import annotations

import logging
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from autofit import __version__
from autofit.workers.cluster.demand import Demand
from autofit.workers.slots.slot import Slot, State
from autofit.workers.slots.trial_actor import TrialActor

NAMESPACE = "autofit"
"""Ray's namespace of the workers' names, for all drivers of a cluster."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class WorkerStarter:
    """Asks for workers on behalf of one pool."""

    ray: Any
    device: str
    """What kind of device they are to find: `auto`, `cpu` or `cuda`."""
    driver: int | None
    """The process of this machine that they end with; None in a cluster, where the driver may be on another machine and
    Ray itself ends a lost driver's workers."""
    _owner: str | None = None
    """Search and epoch of the driver, with which its workers' names begin; None before the search is known."""

    def claim(self, search_id: str, epoch: int) -> None:
        """Workers are this driver's from now on. End those of the search's earlier drivers, which have lower epochs:
        they may still run trials, which nobody stores, and would take time and memory from those of this one."""
        self._owner = f"{search_id}/{epoch}"
        for actor in self.ray.util.list_named_actors(all_namespaces=True):
            named = re.fullmatch(rf"{re.escape(search_id)}/(\d+)/.*", actor["name"])
            if actor["namespace"] == NAMESPACE and named is not None and int(named[1]) < epoch:
                _log.info("autofit: ending worker %s of an earlier driver", actor["name"])
                with suppress(ValueError):  # it has ended since it was listed
                    self.ray.kill(self.ray.get_actor(actor["name"], namespace=NAMESPACE))

    def slot(self, demand: Demand) -> Slot:
        """The workers of one trial, which come up when Ray has their resources."""
        placement = self.ray.util.placement_group(
            [_without_zeros(demand) for _ in range(demand.ranks)],
            strategy=demand.strategy,
            bundle_label_selector=[dict(demand.selector) for _ in range(demand.ranks)] if demand.selector else None,
        )
        slot = Slot(demand=demand, placement=placement)
        self._start_workers(slot)
        return slot

    def restart(self, slot: Slot) -> None:
        """Replace the workers of a slot that runs nothing; its resources stay reserved meanwhile."""
        for actor in slot.actors:
            with suppress(Exception):  # it may be gone already
                self.ray.kill(actor)
        self._start_workers(slot)
        slot.state, slot.heard, slot.placed_at = State.PENDING, [], time.monotonic()

    def _start_workers(self, slot: Slot) -> None:
        slot.actors = [self._worker(slot, rank) for rank in range(slot.demand.ranks)]
        # Ranks on a CPU share its cores, and would measure each other.
        measures = self._owner is not None and (slot.demand.ranks == 1 or "GPU" in slot.demand.bundle)
        # A search claims a cluster's workers before its first trial, which replaces them: they load what trials need
        # from then on. Those of a recording, which claims none, do in their first trial.
        starts = self._owner is not None or self.driver is not None
        slot.answers = [actor.site.remote(measures, starts) for actor in slot.actors]
        slot.ends = [actor.end.remote() for actor in slot.actors]

    def _worker(self, slot: Slot, rank: int) -> Any:
        place = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        named = {} if self._owner is None else {"name": f"{self._owner}/{uuid4().hex[:8]}", "namespace": NAMESPACE}
        # What the user has set for this machine is no business of another.
        threads = None if self.driver is None else os.environ.get("OMP_NUM_THREADS")
        others = {name: amount for name, amount in _without_zeros(slot.demand).items() if name not in ("CPU", "GPU")}
        worker = self.ray.remote(TrialActor).options(
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,  # a trial, what stops it, what asks what it waits for, and what shows the worker's end
            num_cpus=slot.demand.bundle["CPU"],
            num_gpus=slot.demand.bundle.get("GPU", 0),
            resources=others,
            scheduling_strategy=place(slot.placement, placement_group_bundle_index=rank),
            **named,
        )
        return worker.remote(self.device, self.driver, threads, __version__)


def _without_zeros(demand: Demand) -> dict[str, float]:
    return {name: amount for name, amount in demand.bundle.items() if amount}
