"""Holds the devices of a pool's workers against each other: a throttled or shared one shows in its measured rates."""

from __future__ import annotations

from dataclasses import dataclass, field

from autofit.core.device.peers import shortfall
from autofit.core.device.probe import Probe
from autofit.workers.slots.slot import Slot


@dataclass(slots=True, kw_only=True)
class Comparing:
    """What is known of the rates of one type of device."""

    usual: Probe | None = None
    """What the store knows of them; it has a vote, as a node has."""
    _known: dict[tuple[str, int], tuple[str, Probe]] = field(default_factory=dict)
    """The node and the rates of each rank of each slot that has come up, those lost since included."""

    def note(self, slot: Slot) -> None:
        """Take in what the workers of a slot have measured."""
        for rank, (node, probe) in enumerate(zip(slot.node_ids, slot.probes, strict=True)):
            if probe is not None:
                self._known[slot.name, rank] = node, probe

    def slow(self, slot: Slot) -> tuple[str, str] | None:
        """A node of the slot that is clearly slower than its type, and what at; None if none is."""
        for rank in range(slot.demand.ranks):
            node, own = self._known.get((slot.name, rank), ("", None))
            peers = [peer for key, peer in self._known.items() if key != (slot.name, rank)]
            peers += [] if self.usual is None else [("the store", self.usual)]
            if own is not None and (what := shortfall(own, node, peers)) is not None:
                return node, what
        return None
