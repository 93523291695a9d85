"""ZeRO's stage 3: parameters are partitioned too, and gathered around each module that uses them.

When each buffer comes and goes is taken from deepspeed 0.19.8: runtime/zero/stage3.py, partition_parameters.py,
partitioned_param_coordinator.py and parameter_offload.py in the same folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autofit.core.lattice import Config
from autofit.estimate.memory.memory_trace import AFTER, LOSS, Category, Event, MemoryTrace, Place, Storage
from autofit.estimate.sharding.ddp import into_buckets
from autofit.estimate.sharding.edit import ROOT, Edit, Unit, alike, loaded_in_order
from autofit.estimate.sharding.library import Holdings, Traffic
from autofit.estimate.sharding.zero import Zero

PARAMETER_OPERATIONS = 100
"""Operations whose launch takes as long as the Python code that gathers a trained parameter, releases it, and hands on
its gradient, in one micro-step. An order of magnitude: 1.7 to 3.7 ms were measured on 2 cores of an AMD EPYC, where an
operation takes some 25 microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroThree(Zero):
    """Stage 3 of ZeRO, with the optimizer or all parameters in host memory or on disk, or neither."""

    def traced(self, config: Config) -> Config:
        """Never compiled: the hooks that gather parameters leave torch only pieces of a layer to compile."""
        return Zero.traced(self, config).replace(compile=False)

    @property
    def _gathers(self) -> bool:
        """Whether what is gathered is a copy: the only rank of a CPU takes its shard itself (`NoGatherHandle`)."""
        return self.pinned or self.ranks > 1

    def micro_steps(self, trace: MemoryTrace, *, accumulates: bool) -> MemoryTrace:
        last = "backward-2" if accumulates else "backward-1"
        edit = Edit(alike(trace))
        trained = edit.trained_sizes()
        for number in (1, 2):
            self._add_in_place(edit, f"backward-{number}")
            gradients = edit.all_gradients(f"backward-{number}")
            outside = self._gather(edit, number) if self._gathers else ()
            into_buckets(edit, f"backward-{number}", gradients)
            self.last_reduction(edit, f"backward-{number}", ends=f"backward-{number}" == last)
            edit.free(edit.after_stage(f"backward-{number}"), outside)
        self._overflow_checked(edit, last, trained)
        self.norm(edit, last)
        away = self.offload in ("params", "nvme")
        if self.pinned and not away:
            self._set_up(edit)
        parameters = [s for s in edit.trace.storages if s.trained is not None]
        persisting = [s.bytes for s in parameters if self._persists(s)]
        for storage in parameters:
            if not self._persists(storage):
                storage.shares = self.ranks
                storage.bytes = 0 if away else storage.bytes
        if not away:  # their part of the flat buffer exists all the same
            edit.allocate(persisting, None, shares=self.ranks, holds=Category.WEIGHTS)
        edit.allocate([self.buckets.reduce * self.width], None)
        if self.updaters:
            wide = [self.masters * b for b in trained]
            edit.allocate(wide, None, shares=self.ranks, holds=Category.GRADIENTS)
            edit.allocate(wide, None, shares=self.ranks, holds=Category.OPTIMIZER)
        return edit.trace

    def _loaded_bytes(self, storage: Storage) -> int | None:
        """Parameters are whole until they are partitioned."""
        if storage.trained is None or self._persists(storage):
            return None
        return Zero._loaded_bytes(self, storage) or storage.bytes

    def traffic(self, holdings: Holdings, micro_steps: int) -> Traffic:
        moved = Zero.traffic(self, holdings, micro_steps)
        return replace(moved, dispatched=float(PARAMETER_OPERATIONS * len(holdings.sizes) * micro_steps))

    def _add_in_place(self, edit: Edit, stage: str) -> None:
        """Autograd may add to the gradient that DeepSpeed's linear layer (runtime/zero/linear.py) returns: that of a
        head which is the input embedding takes the embedding's, where plain training makes a third."""
        storages, place = edit.trace.storages, Place(stage, LOSS)
        of_loss = [e.storage for at, events in edit.trace.segments if at == place for e in events if e.allocates]
        for total in edit.gradients(stage)[ROOT]:
            heads = [i for i in of_loss if storages[i].freed and storages[i].bytes == storages[total].bytes]
            if len(heads) == 1 and edit.is_tied(total):
                storages[total].freed = storages[total].allocated
                storages[heads[0]].freed = None
                for _, events in edit.trace.segments:
                    events[:] = [e for e in events if e.storage != total and e != Event(heads[0], False)]

    def _overflow_checked(self, edit: Edit, stage: str, trained: Sequence[int]) -> None:
        """With fp16 a rank's gradients are looked through for infinities (`has_overflow`): `torch.isinf` takes their
        absolute values, and a byte for each."""
        if self.updaters and not self.bf16:
            place, events = edit.before_update(stage)
            passing: list[int] = []
            for sizes in ([self.masters * b for b in trained], [b // self.width for b in trained]):
                passing += edit.allocate(sizes, place, shares=self.ranks, stream=self._stream, events=events)
            edit.free(events, passing)

    def _persists(self, storage: Storage) -> bool:
        return self._gathers and self._elements(storage) <= self.buckets.persists

    def _elements(self, parameter: Storage) -> int:
        return self.bytes(parameter) // parameter.item_bytes

    def update(self, trace: MemoryTrace, holdings: Holdings) -> MemoryTrace:
        """The flat partition's update, with a flat copy of the gradients of what it updates at a time."""
        updates = Zero.update(self, trace, holdings)
        size, storages = int(self.largest_group(holdings.sizes) * self.masters), list(updates.storages)
        segments: list[tuple[Place, list[Event]]] = []
        for place, events in updates.segments:
            storages.append(Storage(size, place, place, holds=Category.TEMPORARIES))
            copy = len(storages) - 1
            segments.append((place, [Event(copy, True), *events, Event(copy, False)]))
        return replace(updates, storages=storages, segments=segments)

    def _gather(self, edit: Edit, number: int) -> Sequence[int]:
        """A module is whole while it runs. DeepSpeed prefetches faster than modules run: at each of them, those without
        parameters too, until as many parameters as may be live are whole (`fetch_sub_module`).

        The backward recomputes a layer and then needs it again, so that all of it is whole: its frozen weights beside
        what was prefetched, as they are released first, and are not prefetched again. The root itself reads the head
        (`ZeROOrderedDict` of runtime/zero/parameter_offload.py), which is therefore whole from the start of the forward
        to the end of the backward. Returns what is whole there still, while the last gradients are handed on.
        """
        forward, backward = f"forward-{number}", f"backward-{number}"
        last = edit.at_end(Place(backward, 0))
        start = edit.before_stage(forward)
        lead, rest = self._around(edit)
        head, embedded = self._fetch(edit, rest, start), self._fetch(edit, lead, start)
        room = self.buckets.live - sum(map(self._elements, rest))
        kept: dict[Unit, Sequence[int]] = {}
        for layer in edit.layers:
            start_of, end_of = edit.at_start(Place(forward, layer)), edit.at_end(Place(forward, layer))
            following = [p for later in edit.layers[layer:] for p in self._gathered(edit, later)]
            kept[layer] = self._fetch(edit, filter(self._is_kept, self._gathered(edit, layer)), start_of)
            ahead = [p for p in self._live(following, room, layer) if p.layer != layer or not self._is_kept(p)]
            edit.free(end_of, self._fetch(edit, ahead, start_of))
        edit.free(edit.at_start(Place(forward, 0)), embedded)  # counts among what may be live: layers take its place
        whole = self._fetch(edit, self._ahead(self._backwards(edit, edit.layers), room), end_of)
        for layer in reversed(edit.layers):
            start_of, end_of = edit.at_start(Place(backward, layer)), edit.at_end(Place(backward, layer))
            edit.free(start_of, whole)
            whole = self._fetch(edit, self._behind(edit, layer, room), start_of)
            edit.free(end_of, kept[layer])
        edit.free(end_of, whole)
        return (*self._fetch(edit, lead, last), *head)

    def _recomputes(self, layer: int) -> bool:
        return self.interval > 0 and layer % self.interval == 0

    def _is_kept(self, parameter: Storage) -> bool:
        """Whether what was gathered of it in the forward is kept for the backward. Of 4-bit weights it is, checkpointed
        or not: outside of what autograd saves (`ctx.tensors` of bitsandbytes' MatMul4Bit). Of stacked experts autograd
        saves slices, which are part of what was gathered; a whole parameter it finds again."""
        if parameter.stacked and parameter.layer is not None:
            return not self._recomputes(parameter.layer)
        return parameter.item_bytes == 1

    def _gathered(self, edit: Edit, unit: Unit) -> list[Storage]:
        return [p for p in edit.parameters(unit) if not self._persists(p)]

    def _around(self, edit: Edit) -> tuple[list[Storage], list[Storage]]:
        """(What only the start of a forward needs, everything else outside the layers). With nothing after the layers,
        as with a tied head, all of it is in the latter."""
        first = {id(p) for p in itertools.takewhile(lambda p: p.layer is None, loaded_in_order(edit.trace))}
        outside = self._gathered(edit, ROOT)
        lead = [p for p in outside if id(p) in first]
        rest = [p for p in outside if id(p) not in first]
        return (lead, rest) if rest else ([], lead)

    def _behind(self, edit: Edit, layer: int, room: int) -> list[Storage]:
        """What is whole when a layer's backward begins."""
        if not self._recomputes(layer):
            return self._live(self._backwards(edit, edit.layers[: layer + 1]), room, layer)
        parameters = self._gathered(edit, layer)
        left = room - sum(self._elements(p) for p in parameters if p.trained)
        return [*parameters, *self._ahead(self._backwards(edit, edit.layers[:layer]), left)]

    def _backwards(self, edit: Edit, layers: range) -> list[Storage]:
        return [parameter for layer in reversed(layers) for parameter in reversed(self._gathered(edit, layer))]

    def _live(self, parameters: Sequence[Storage], room: int, layer: int) -> list[Storage]:
        """What of the parameters, in their order, is whole while a layer runs: what fits, and in any case the layer's
        largest."""
        ahead = self._ahead(parameters, room)
        largest = sorted((p for p in parameters if p.layer == layer), key=self._elements)[-1:]
        return max(ahead, largest, key=lambda whole: sum(map(self._elements, whole)))

    def _ahead(self, parameters: Iterable[Storage], room: int) -> list[Storage]:
        """The first of the parameters, in their order, that fill `room` elements."""
        fetched: list[Storage] = []
        for parameter in parameters:
            if room <= 0:
                break
            fetched.append(parameter)
            room -= self._elements(parameter)
        return fetched

    def _fetch(self, edit: Edit, parameters: Iterable[Storage], events: list[Event]) -> Sequence[int]:
        # Without overlap, `__allgather_stream` of runtime/zero/partitioned_param_coordinator.py is the main stream.
        sizes = [parameter.bytes for parameter in parameters]
        buffers = edit.allocate(sizes, Place("forward-1", AFTER), stream=int(self.buckets.overlaps))
        events += [Event(index, True) for index in buffers]
        return buffers
