"""Holds the devices of a pool's workers against each other: a throttled or shared one shows in its measured rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from autofit.core.device.probe import Probe
from autofit.workers.slots.slot import Slot

SLOW = 0.75
"""Share of its type's speed below which a device is not what it is called. Sound ones are above: probes of one H100 on
different days differ by up to 2 %, of an H200 by 5 % (benchmarks/recorded), of two cores of a shared processor by a
sixth (benchmarks/README.md); and GPUs of one model in a cluster by 8 % on average, by 22 % at most (Sinha et al. 2022,
"Not All GPUs Are Created Equal", SC22)."""


@dataclass(slots=True, kw_only=True)
class DeviceSpeeds:
    """What is known of the rates of one type of device."""

    usual: Probe | None = None
    """What the store knows of them; it has a vote, as a node has."""
    _probes: dict[tuple[str, int], tuple[str, Probe]] = field(default_factory=dict)
    """The node and the rates of each rank of each slot that has come up, those lost since included."""

    def note(self, slot: Slot) -> None:
        """Take in what the workers of a slot have measured."""
        for rank, (node, probe) in enumerate(zip(slot.node_ids, slot.probes, strict=True)):
            if probe is not None:
                self._probes[slot.name, rank] = node, probe

    def slow(self, slot: Slot) -> tuple[str, str] | None:
        """A node of the slot that is clearly slower than its type, and what at; None if none is."""
        for rank in range(slot.demand.ranks):
            node, probe = self._probes.get((slot.name, rank), ("", None))
            peers = [peer for key, peer in self._probes.items() if key != (slot.name, rank)]
            peers += [] if self.usual is None else [("the store", self.usual)]
            if probe is not None and (what := shortfall(probe, node, peers)) is not None:
                return node, what
        return None


def shortfall(probe: Probe, node: str, peers: Iterable[tuple[str, Probe]]) -> str | None:
    """What a device of `node` is clearly slower at than its type, in a few words; None if at nothing. `peers` are other
    devices of its type, each with its node.

    Each part of the probe is judged alone: a card at a low clock reads its memory as fast as others. The type's speed
    is that of the middle node, or the faster of two in the middle. So one that is fast by mistake condemns nobody, and
    of two nodes the slower is the slow one. A node has one vote, its fastest device.
    """
    others, worst, what = list(peers), SLOW, None
    for part in probe.parts:
        votes: defaultdict[str, float] = defaultdict(lambda: 0.0, {node: 1.0})
        for other_node, other in others:
            rates = next((p.seconds_per for p in other.parts if p.name == part.name), {})
            votes[other_node] = max(votes[other_node], _times_as_fast(rates, part.seconds_per))
        compared = sorted(vote for vote in votes.values() if vote)
        share = 1.0 / compared[len(compared) // 2]
        if share < worst:
            name = probe.hardware.name
            worst, what = share, f"{part.name} run there at {share:.0%} of the speed usual for {name} here"
    return what if what is None or not probe.doubts else f"{what} ({'; '.join(probe.doubts)})"


def _times_as_fast(rates: Mapping[str, float], reference: Mapping[str, float]) -> float:
    """How many times as fast `rates` are, in the median of the kinds of work; 0 where none is in both."""
    return median([reference[kind] / rates[kind] for kind in reference if rates.get(kind)] or [0.0])
