"""The slots of a pool: asked of Ray, taken in as they come up, dropped when they are lost, given back when unneeded."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autofit.catalog.hardware import card_of
from autofit.core.device.probe import Probe
from autofit.core.errors import EnvironmentLacks
from autofit.core.units import GIB
from autofit.trial.machine.detection import check_even
from autofit.workers.cluster import nodes as cluster
from autofit.workers.cluster.demand import DeviceRequest, check_capacity
from autofit.workers.cluster.nodes import Node
from autofit.workers.slots.missing import MissingRequirements
from autofit.workers.slots.slot import Site, Slot, StartFailed, State
from autofit.workers.slots.speeds import DeviceSpeeds
from autofit.workers.slots.worker_starter import WorkerStarter

RENEW_SECONDS = 2.0
"""Time between two looks at what the cluster has."""
IDLE_SECONDS = 120.0
"""A slot of a cluster that has been idle for so long is given back."""
NODES_SECONDS = 120.0
"""How long a cluster may take to have its first suitable node, where no autoscaler says that it can add one."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class SlotSet:
    """The slots of one pool. However many of them are lost, those that are left go on. Used from one thread."""

    ray: Any
    wanted: DeviceRequest
    workers: int | None
    """Trials at a time; None for as many as there is room for, now and whenever more becomes free."""
    is_private: bool
    """Whether nobody else uses this Ray, and no node can join it."""
    starter: WorkerStarter
    missing: MissingRequirements
    slots: list[Slot] = field(default_factory=list)
    site: Site | None = None
    """What every slot's device and versions are like; None until the first is accepted."""
    given_back: int = 0
    """Slots that were not needed and may be asked for again."""
    speeds: DeviceSpeeds = field(default_factory=DeviceSpeeds)
    set_aside: dict[str, str] = field(default_factory=dict)
    """Names of slots whose trials are of no use, each with a sentence that says why."""
    left_out: set[str] = field(default_factory=set)
    """Names of slots that get no more trials, because their machinery fails."""
    nodes: list[Node] = field(default_factory=list)
    """As they were at the last look."""
    none_since: float | None = None
    """Since when there is neither a worker, up or starting, nor a node for one; by the monotonic clock."""
    _renewed: float = float("-inf")
    _up_at: float | None = None
    """When the first worker was up."""
    _failed_starts: Counter[str] = field(default_factory=Counter)
    _refusal: EnvironmentLacks | None = None
    """Why the last worker that was refused was."""
    _messages: set[str] = field(default_factory=set)
    """What the user has been told."""

    @property
    def up(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.is_up]

    @property
    def idle(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.state is State.IDLE]

    @property
    def pending(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.state is State.PENDING]

    def host(self, node_id: str) -> str:
        return next((node.host for node in self.nodes if node.node_id == node_id), "an unknown machine")

    def is_alone(self, slot: Slot, rank: int) -> bool:
        """Whether nobody else had a device of that machine when the nodes were last looked at."""
        node_id = slot.node_ids[rank]
        ranks = slot.node_ids.count(node_id)
        return all(node.gpus - node.free_gpus <= ranks for node in self.nodes if node.node_id == node_id)

    def sharing(self, slot: Slot) -> int:
        """How many ranks may share the cores of a slot's machine, its own included: one per GPU there."""
        if not self.wanted.uses_gpus:
            return 1
        gpus = max((int(node.gpus) for node in self.nodes if node.node_id in slot.node_ids), default=1)
        if self.is_private and self.workers is not None:
            gpus = min(gpus, self.workers * self.wanted.ranks)
        return max(1, gpus)

    def free(self, slot: Slot) -> None:
        """The slot's trial has ended. One that is set aside or left out gets no other."""
        if slot.name in self.set_aside or slot.name in self.left_out:
            self.drop(slot)
        else:
            slot.free()

    def drop(self, slot: Slot) -> None:
        slot.end(self.ray)
        self.slots.remove(slot)

    def leave_out(self, worker: str, reason: str) -> bool:
        """As `Pool.leave_out`; the other slots of its machines go on."""
        if worker in self.left_out:
            return True
        unusable = self.set_aside.keys() | self.left_out
        usable = {slot.name: slot for slot in self.slots if slot.is_placed and slot.name not in unusable}
        slot = usable.pop(worker, None)
        if slot is None or not usable:
            return False
        nodes = set(slot.node_ids)
        self._say(f"a worker on {', '.join(sorted(map(self.host, nodes)))} is left out: {reason}")
        self.left_out.add(worker)
        if len(nodes) == 1:  # of several it is not known which has failed
            self.wanted.left_out |= nodes
        if slot.state is State.IDLE:
            self.drop(slot)
        return True

    def renew(self, needed: int = 0) -> None:
        """Take in what has come up and ask for what is wanted now, where `needed` trials wait for a worker. Raises
        `EnvironmentLacks` when no slot is up and none can be hoped for."""
        placed = self._take_in()
        if placed or time.monotonic() - self._renewed >= RENEW_SECONDS:
            self._renewed, self.nodes = time.monotonic(), cluster.nodes(self.ray)
            self._give_back(needed)
            self._ask()
            if any(slot.is_placed for slot in self.slots):
                self.none_since = None
            else:
                self._wait_for_any()

    def _wait_for_any(self) -> None:
        """No worker is up or starting: others' may end, however long that takes, or a node may join. Raises
        `EnvironmentLacks` once that is waited for in vain, with the reason why the last worker that came up was not
        taken, if one did."""
        if self.wanted.capacity(self.nodes):
            self.none_since = None
            if not self.wanted.room(self.nodes):
                taken = f"others use all {self.wanted}"
                if self.wanted.ranks > 1:
                    taken = f"others leave no room for {self.wanted.ranks} {self.wanted}"
                self._say(f"{taken}: this search waits its turn")
            return
        is_coming = self.wanted.addable.get("GPU" if self.wanted.uses_gpus else "CPU")
        # Where it is coming, a machine is rented and an image of many GB is loaded.
        seconds = 0.0 if self.is_private else 1800.0 if is_coming else NODES_SECONDS
        self.none_since = self.none_since or time.monotonic()
        if time.monotonic() - self.none_since < seconds:
            self._say(f"Ray has no {self.wanted} yet: waiting for a node")
            return
        if self._refusal is not None:
            raise self._refusal
        if self.site is not None:
            raise EnvironmentLacks(
                f"Ray has lost its last worker and has no other {self.wanted}",
                remedy="check `ray status`, and run the same command when there are nodes again: it resumes",
            )
        check_capacity(self.wanted, self.nodes)

    def _say(self, text: str) -> None:
        if text not in self._messages:
            self._messages.add(text)
            _log.warning("autofit: %s", text)

    def _take_in(self) -> bool:
        """Accept or refuse the slots whose workers have answered; returns whether Ray has placed any."""
        placed = False
        for slot in self.pending:
            placed = slot.look(self.ray) or placed
            if slot.is_placed and not slot.heard:
                try:
                    slot.hear(self.ray)
                except EnvironmentLacks as error:
                    self._refuse(slot, error)
        heard = [slot for slot in self.pending if slot.heard]
        if heard and self._may_choose(heard):
            for slot in heard:
                try:
                    self._judge(slot)
                except EnvironmentLacks as error:  # it was lost while it was asked: the others go on
                    self._refuse(slot, error)
            self._compare()
        return placed

    def _may_choose(self, heard: Sequence[Slot]) -> bool:
        """Whether the kind of device is known: that of most workers, once all that Ray has placed are up, or a minute
        after the first."""
        if self.site is not None:
            return True
        self._up_at = self._up_at or time.monotonic()
        starting = [slot for slot in self.pending if slot.is_placed and not slot.heard]
        if starting and time.monotonic() - self._up_at < 60.0:
            return False
        card = self.wanted.card
        sites = [site for slot in heard for site in slot.heard if card is None or card_of(site[0].name) == card]
        kinds = Counter(map(kind, sites))
        if kinds:
            (chosen, _), *_ = kinds.most_common(1)
            self.site = next(site for slot in heard for site in slot.heard if kind(site) == chosen)
        return True

    def _judge(self, slot: Slot) -> None:
        """Accept a slot that has what the others have, and lacks nothing; else leave its nodes out."""
        slot.at_fault = tuple(
            node
            for node, site in zip(slot.node_ids, slot.heard, strict=True)
            if self.site is None or kind(site) != kind(self.site)
        )
        if slot.at_fault:
            self._refuse(slot, self._difference(slot))
        elif (lacks := self.missing.later(slot)) is not None:
            self._refuse(slot, EnvironmentLacks(lacks, remedy="or leave that machine out"))
        else:
            slot.accept()
            self.speeds.note(slot)
            if slot.unmeasured is not None:
                self._say(f"{self.host(slot.node_ids[0])} is not compared with the others: {slot.unmeasured}")
            self.site = slot.site if len(self.up) == 1 else self.site
            if self.wanted.is_packed is None:
                self.wanted.is_packed = len(set(slot.node_ids)) == 1

    def _compare(self) -> None:
        """Leave out what is clearly slower than its type, as long as others are up: trials of both would not be of one
        device. The other devices of its node go on, if they are as fast as they should be."""
        usable = [slot for slot in self.up if slot.name not in self.set_aside]
        slow = {slot: finding for slot in usable if (finding := self.speeds.slow(slot)) is not None}
        for slot, (node, what) in slow.items():
            sentence = f"{self.host(node)} is slow: {what}"
            if len(slow) == len(usable):
                self._say(f"{sentence}; it is used all the same, as there is no other")
                continue
            self._say(f"{sentence}: its trials are set aside")
            self.set_aside[slot.name] = sentence
            self.wanted.left_out.add(node)
            if slot.state is State.IDLE:
                self.drop(slot)

    def _difference(self, slot: Slot) -> EnvironmentLacks:
        try:
            check_even([f"{h.device_name} ({round(h.memory_bytes / GIB)} GiB)" for h, _ in slot.heard])
        except EnvironmentLacks as uneven:
            return uneven
        (hardware, stack), *_ = slot.heard
        card, site = self.wanted.card, self.site
        if site is None or hardware.key != site[0].key:
            wanted = site[0].name if site is not None else card.name if card is not None else "something else"
            reason = f"the workers there have {hardware.name}, and the search is for {wanted}"
            return EnvironmentLacks(reason, remedy="name the hardware to search on with --hardware")
        reason = f"the library versions there differ: {stack}, not {site[1]}"
        return EnvironmentLacks(reason, remedy="use one image on all nodes")

    def _refuse(self, slot: Slot, reason: EnvironmentLacks) -> None:
        """Give a slot back, and leave its nodes at fault out unless another worker may come up there: after the third
        start that ends before the worker can say anything, none will."""
        self.drop(slot)
        self._refusal, nodes = reason, set(slot.at_fault or slot.node_ids)
        self._failed_starts.update(nodes)
        if isinstance(reason, StartFailed):
            nodes = {node for node in nodes if self._failed_starts[node] >= 3}
        self.wanted.left_out |= nodes
        if nodes and not self.is_private:
            self._say(f"{', '.join(sorted({self.host(node) for node in nodes}))} is left out: {reason}")

    def _give_back(self, needed: int) -> None:
        """End what has been idle for long, but for one, and ask no longer for more; ask again where trials wait and
        nothing is idle."""
        if not self.idle:
            self.given_back -= max(0, min(needed - len(self.pending), self.given_back))
        if needed or self.is_private:
            return
        unneeded = [slot for slot in self.idle if time.monotonic() - slot.idle_since > IDLE_SECONDS]
        waiting = [slot for slot in self.pending if not slot.is_placed and unneeded]
        spared = len(self.up) - max(1, len(self.up) - len(unneeded))
        for slot in [*unneeded[:spared], *waiting]:
            self.drop(slot)
            self.given_back += 1

    def _ask(self) -> None:
        """Ask Ray for as many slots as are wanted, and no longer for those that are not."""
        placed = [slot for slot in self.slots if slot.is_placed]
        used = {node for slot in placed for node in slot.node_ids}
        demand, room = self.wanted.demand(self.nodes, used), self.wanted.room(self.nodes, used)
        if self.workers is None:
            most = max(1, len(placed) + max(0, room - self.given_back))
        else:
            most = self.workers - self.given_back
        missing = most - len(placed)
        # On CPUs a trial takes a whole machine, and where one is placed decides what the next may ask for.
        missing = missing if self.wanted.uses_gpus else min(1, missing)
        for slot in [slot for slot in self.pending if not slot.is_placed]:
            if missing < 1 or slot.demand != demand:
                self.drop(slot)
            else:
                missing -= 1
        self.slots += [self.starter.slot(demand) for _ in range(missing)]

    def claim(self, search_id: str, epoch: int, usual: Probe | None) -> None:
        """As `Pool.claim`: replace all workers, each in its place; none may be running a trial."""
        self.speeds.usual = usual
        self.starter.claim(search_id, epoch)
        for slot in self.slots:
            self.starter.restart(slot)

    def close(self) -> None:
        slots, self.slots = self.slots, []
        for slot in slots:
            slot.end(self.ray)


def kind(site: Site) -> tuple[str, str]:
    """What the devices and versions of slots must have in common."""
    hardware, stack = site
    return hardware.key, stack.key
