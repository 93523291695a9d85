"""PyTorch's `fully_shard`: a layer's parameters are gathered while it runs, its gradients scattered once it has run.

Taken from torch/distributed/fsdp/_fully_shard (torch 2.13): `FSDPParamGroup` gathers into one flat buffer and copies
out of it into the parameters (`wait_for_unshard`). The forward frees the flat buffer once the next layer is there, the
backward at once; it gathers the preceding layer meanwhile (`_backward_prefetch`). `foreach_reduce` copies a layer's
gradients into the input of its reduce-scatter, which is kept until the next layer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from autofit.estimate.memory.memory_trace import AFTER, Category, Event, MemoryTrace, Place, Storage
from autofit.estimate.sharding.edit import ROOT, Edit, Unit, alike
from autofit.estimate.sharding.library import Holdings, Hosted, Library, Traffic, passes

GATHERING, REDUCING = 1, 2
"""Separate streams, `all_gather_copy_in_stream` and `reduce_scatter_stream`; whole parameters are on the device's main
stream."""
FOREACH = 20 / 7
"""What Adam's update reads and writes operation by operation (`_multi_tensor_adam` of torch/optim/adam.py, torch 2.13),
over what it does in one pass: weights and both moments both ways, and gradients once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp(Library):
    """`fully_shard` on every decoder layer and on the root.

    Where precision is mixed, shards and reduced gradients are fp32; only what is gathered is in 16 bits.
    """

    reshards: bool
    """Whether a layer is sharded again between its forward and its backward."""
    foreach: bool
    """Whether the update goes over all shards operation by operation (`_multi_tensor_adam` of torch/optim/adam.py)."""

    @property
    def offloads(self) -> bool:
        """Whether shards, gradients and states live in host memory (CPUOffloadPolicy)."""
        return not self.updaters

    def micro_steps(self, trace: MemoryTrace, *, accumulates: bool) -> MemoryTrace:
        """Gradients are scattered at every micro-step, and their shards accumulated."""
        edit = Edit(alike(trace))
        for number in (1, 2):
            _MicroStep(edit, number, self).write()
        for storage in edit.trace.storages:
            if storage.trained is not None:
                self._shard(storage)
        return edit.trace

    def hosted(self, holdings: Holdings, *, accumulates: bool) -> Hosted:
        if not self.offloads:
            return Hosted()
        return Hosted(
            parameters=(holdings.frozen_bytes + holdings.stored_bytes) / self.ranks,
            gradients=holdings.stored_bytes / self.ranks,
            optimizer=holdings.states_bytes / self.ranks,
            passing=holdings.states_bytes / 2 / self.ranks if self.foreach else 0.0,  # roots of the second moments
        )

    def traffic(self, holdings: Holdings, micro_steps: int) -> Traffic:
        away = (self.ranks - 1) / self.ranks
        gathered = (holdings.trained_bytes + holdings.frozen_bytes) * (2 if self.reshards else 1)
        reduced = holdings.trained_bytes * self.masters
        share = (gathered + reduced) / self.ranks
        return Traffic(
            linked=micro_steps * away * (gathered + reduced),
            overlapped=True,
            hosted=micro_steps * share if self.offloads else 0.0,
            updated_on_host=passes(holdings, self.ranks) * (FOREACH if self.foreach else 1.0) if self.offloads else 0.0,
        )

    def _shard(self, storage: Storage) -> None:
        storage.shares = self.ranks
        storage.bytes *= self.masters if storage.trained else 1
        if self.offloads:
            storage.bytes = 0


class _MicroStep:
    """Writes the buffers of one micro-step."""

    def __init__(self, edit: Edit, number: int, of: Fsdp) -> None:
        self._edit = edit
        self._of = of
        self._number = number
        self._forward, self._backward = f"forward-{number}", f"backward-{number}"
        self._allocate = partial(edit.allocate, place=Place(self._forward, AFTER))
        self._flat: Sequence[int] = ()
        """The buffer that collects the shards of all ranks."""
        self._whole: dict[Unit, Sequence[int]] = {}
        """The gathered parameters."""
        self._reduced: Sequence[int] = ()
        """The input of the latest reduce-scatter."""

    def write(self) -> None:
        """Write the forward, then the backward."""
        gradients = self._edit.gradients(self._backward)
        self._write_forward()
        events = self._edit.before_stage(self._backward)
        end = self._edit.after_stage(self._backward)
        if self._of.reshards:
            self._gather(ROOT, events)
        for layer in reversed(self._edit.layers):
            if self._of.reshards:
                self._collect(layer, events)  # while what precedes it in the backward is running
            place = Place(self._backward, layer)
            events = self._edit.at_start(place)
            if self._of.reshards:
                self._lay_out(layer, events)
                self._drop_flat(events)
            self._scatter(layer, gradients[layer], self._edit.at_end(place))
        self._scatter(ROOT, gradients[ROOT], end)
        self._edit.free(end, self._reduced)

    def _write_forward(self) -> None:
        after = self._edit.after_stage(self._forward)
        self._gather(ROOT, self._edit.before_stage(self._forward), keeps=True)
        for layer in self._edit.layers:
            place = Place(self._forward, layer)
            self._gather(layer, self._edit.at_start(place), keeps=True)
            if self._of.reshards:
                self._edit.free(self._edit.at_end(place), self._whole.pop(layer))
        self._drop_flat(after)
        if self._of.reshards:
            self._edit.free(after, self._whole.pop(ROOT))

    def _gather(self, unit: Unit, events: list[Event], *, keeps: bool = False) -> None:
        """The forward `keeps` the flat buffer until the next one has been copied out of: a variable of
        `wait_for_unshard` holds it."""
        previous = self._flat
        self._collect(unit, events)
        self._lay_out(unit, events)
        self._edit.free(events, previous)
        if not keeps:
            self._drop_flat(events)

    def _collect(self, unit: Unit, events: list[Event]) -> None:
        """Gather into one flat buffer; the rank's own share is copied first if it is cast, or comes from the host."""
        trained = None if self._of.offloads else True
        shards = self._edit.parameters(unit, trained=trained) if self._of.offloads or self._of.mixed else []
        sent = self._allocate((p.bytes for p in shards), events=events, shares=self._of.ranks, stream=GATHERING)
        self._flat = self._allocate((p.bytes for p in self._edit.parameters(unit)), events=events, stream=GATHERING)
        self._edit.free(events, sent)

    def _lay_out(self, unit: Unit, events: list[Event]) -> None:
        self._whole[unit] = self._allocate((p.bytes for p in self._edit.parameters(unit)), events=events)

    def _drop_flat(self, events: list[Event]) -> None:
        self._edit.free(events, self._flat)
        self._flat = ()

    def _scatter(self, unit: Unit, gradients: Sequence[int], events: list[Event]) -> None:
        """The unit is sharded again; its gradients are copied, reduced, and added to those of the shards."""
        self._edit.free(events, self._whole.pop(unit))
        trained = [p.bytes * self._of.masters for p in self._edit.parameters(unit, trained=True)]
        if not trained:
            return
        self._edit.free(events, self._reduced)
        self._reduced = self._allocate(trained, events=events)
        self._edit.free(events, gradients)
        shard = self._allocate(trained, events=events, shares=self._of.ranks, holds=Category.GRADIENTS, stream=REDUCING)
        if self._number > 1 or self._of.offloads:
            self._edit.free(events, shard)
