"""DeepSpeed's ZeRO: flat partitions of master weights and states, gradients reduced through buckets of fixed size.

Here is what the stages have in common, and when the buffers of stages 1 and 2 come and go; those of stage 3 are in
zero_third.py. They are taken from deepspeed 0.19.8: runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py, and for
stage 1 with bf16 weights runtime/bf16_optimizer.py, which keeps fp32 gradients of the whole model
(`_setup_for_real_optimizer`). Trained weights lie in one flat buffer, of which stage 3 keeps its own part.
`setup_buckets` allocates a bucket in full however small the model is. Gradients are summed over micro-batches in fp32
where weights are 16-bit and their masters fp32 (`sums_in_fp32` of techniques/deepspeed_settings.py): stage 2 has a flat
partition for that from the first reduction on (`_get_compact_grad_partition_buffer`), stage 3 from the start
(`grad_partitions_flat_buffer`, on the host if the optimizer is). Where masters have the weights' own format, stage 2
copies its part out of the bucket at every micro-batch (`copy_grads_in_partition`), and `step` makes one more flat copy;
with the optimizer on the host the sums are there, too (`async_accumulate_grad_in_cpu_via_gpu`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autofit.estimate.memory.memory_trace import AFTER, Category, Event, MemoryTrace, Place, Storage
from autofit.estimate.memory.symbolic_sizes import RANK
from autofit.estimate.sharding.ddp import into_buckets
from autofit.estimate.sharding.edit import ROOT, Edit, Unit, alike, in_order
from autofit.estimate.sharding.library import Holdings, Hosted, Library, Traffic, passes
from autofit.techniques.deepspeed_settings import SUB_GROUP

NORM_BYTES = 8
"""Per element of a gradient while its norm is computed (`get_norm_dtype` of runtime/zero/utils.py)."""
NORM_ELEMENTS = 250_000_000
"""Elements of a gradient that stage 3 widens to NORM_BYTES at a time, where the optimizer is on the host (`buffer_size`
of `_constant_buffered_norm2`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The buffer sizes that DeepSpeed is configured with, in elements."""

    reduce: int
    """`reduce_bucket_size`."""
    live: int = 0
    """`stage3_max_live_parameters`: so many are gathered, and no more are prefetched."""
    persists: int = 0
    """`stage3_param_persistence_threshold`: parameters no larger than this are kept whole on every rank."""
    overlaps: bool = False
    """`overlap_comm`: stages 1 and 2 then have two buckets."""
    group: int = 0
    """`sub_group_size`, where states are in files: a group with fewer elements takes the next parameter, too."""
    parameter: int = 0
    """`buffer_size` of parameters in files: no parameter is larger."""
    parameters: int = 0
    """`buffer_count` of parameters in files."""
    states: int = 0
    """`buffer_count` of states in files; each buffer is as large as the largest group."""
    in_memory: int = 0
    """`max_in_cpu`: this many of the trained parameters are in host memory, too."""

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Buckets:
        """From DeepSpeed's JSON."""
        zero = settings["zero_optimization"]
        files, states = zero.get("offload_param", {}), zero.get("offload_optimizer", {})
        return cls(
            reduce=zero["reduce_bucket_size"],
            live=zero.get("stage3_max_live_parameters", 0),
            persists=zero.get("stage3_param_persistence_threshold", 0),
            overlaps=zero["overlap_comm"],
            group=zero.get("sub_group_size", 0),
            parameter=files.get("buffer_size", 0),
            parameters=files.get("buffer_count", 0),
            states=states.get("buffer_count", 0),
            in_memory=files.get("max_in_cpu", 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero(Library):
    """Stage 1 or 2 of ZeRO, with the optimizer in host memory or not; and what stage 3 shares with them."""

    stage: int
    wide: bool
    """Whether weights are fp32."""
    bf16: bool
    """Whether 16 bits are bf16, for whose stage 1 DeepSpeed has an optimizer of its own."""
    pinned: bool
    """Whether host buffers are page-locked: PyTorch's allocator then rounds them up to the next power of two
    (aten/src/ATen/core/CachingHostAllocator.h)."""
    buckets: Buckets
    rank: int
    """Of the adapters."""

    @property
    def flat(self) -> float:
        return SUB_GROUP * self.ranks if self.stage == 3 else math.inf

    @property
    def keeps_inputs(self) -> bool:
        """A frozen layer's own backward would keep its gathered weight alive: stage 3 has another for all layers
        (`zero3_linear_wrap`), which finds weights through their parameters, and keeps every input."""
        return self.stage == 3

    def micro_steps(self, trace: MemoryTrace, *, accumulates: bool) -> MemoryTrace:
        last = "backward-2" if accumulates else "backward-1"
        if self.stage == 2:
            edit, trained = self._second(trace, last)
        elif self.mixed and self.bf16 and self.updaters:
            edit, trained = self._first_mixed(trace, last)
        else:
            edit, trained = self._first(trace, last)
        if self.updaters:
            edit.allocate((self.masters * b for b in trained), None, shares=self.ranks, holds=Category.OPTIMIZER)
        else:  # temp_grad_buffer_for_gpu_offload
            edit.allocate([max(trained, default=0)], None)
        return edit.trace

    def hosted(self, holdings: Holdings, *, accumulates: bool) -> Hosted:
        """A rank's masters, states and gradients, the 16-bit copy on its way to the device, and the gradient sums."""
        if self.offload == "none":
            return Hosted()
        trained = holdings.trained_bytes / self.ranks
        masters, states = self._block(self.masters * trained), holdings.states_bytes / self.ranks
        if self.offload == "nvme":
            return self._beside_files(trained, holdings.sizes)
        kept: list[float] = []
        passing: list[float] = []
        sums: list[float] = []
        if self.stage == 3:
            sums = [self.masters * trained]  # of the micro-batches so far (grad_partitions_flat_buffer)
            if self.offload != "optimizer":
                kept = [trained, holdings.frozen_bytes / self.ranks]
        else:
            # What goes back to the device, and the buffer that gradients pass through on their way to the host
            # (param_buffer_of_bit16_for_cpu_offload_groups, temp_grad_buffer_for_cpu_offload).
            passing = [trained, max(holdings.sizes, default=0)]
            if self.stage == 2 and accumulates and (self.mixed or self.wide):
                # The gradients of the micro-batches so far, each whole (accumulated_grads_in_cpu). Pure bf16 sums them
                # in the masters' own gradients, and stage 1 on the device.
                sums = [float(size) for size in self._reached(holdings.sizes)]
        return Hosted(
            parameters=sum(map(self._block, kept)),
            gradients=masters + sum(map(self._block, sums)),
            optimizer=masters + states,
            passing=sum(map(self._block, passing)),
        )

    def _beside_files(self, trained: float, sizes: Sequence[int]) -> Hosted:
        """What stays in host memory all the same, `trained` being a rank's share of the trained parameters in bytes:
        gradients while they are summed, some parameters, and the buffers through which parameters and states go to the
        files and back, locked from the start (`new_cpu_locked_tensor` of csrc/aio). Frozen parameters are in files
        only."""
        buffers = self.buckets.parameters * self.buckets.parameter * self.width
        return Hosted(
            parameters=self._block(min(trained, self.buckets.in_memory * self.width)),
            gradients=self._block(self.masters * trained),
            passing=buffers + self.buckets.states * self.masters * self._largest_group(sizes),
        )

    def _largest_group(self, sizes: Sequence[int]) -> float:
        """Bytes of a rank's largest group of trained parameters with these `sizes`, in order: one is closed once it has
        enough elements (`_create_fp16_sub_groups` of runtime/zero/stage3.py)."""
        groups = [0.0]
        for size in sizes:
            if groups[-1] >= self.buckets.group * self.width:
                groups.append(0.0)
            groups[-1] += size / self.ranks
        return max(groups)

    def traffic(self, holdings: Holdings, micro_steps: int) -> Traffic:
        away = (self.ranks - 1) / self.ranks
        trained, everything = holdings.trained_bytes, holdings.trained_bytes + holdings.frozen_bytes
        reductions = 1 if self.stage == 1 else micro_steps
        if self.stage == 3:
            linked = micro_steps * away * (2 * everything + trained)
        else:
            linked = away * trained * (2 * reductions + 1)  # all-reduced, although each rank keeps only its own part
        hosted = disk_read = disk_written = 0.0
        if self.offload != "none":
            hosted = (self._sums_moved(micro_steps) + self.masters + 1.0) * trained / self.ranks
        if self.offload in ("params", "nvme"):
            hosted += 2.0 * micro_steps * everything / self.ranks
        if self.offload == "nvme":
            swapped = (self.masters * trained + holdings.states_bytes) / self.ranks
            disk_read = swapped + 2.0 * micro_steps * everything / self.ranks
            disk_written = swapped + trained / self.ranks
        return Traffic(
            linked=linked,
            overlapped=self.buckets.overlaps,
            hosted=hosted,
            disk_read=disk_read,
            disk_written=disk_written,
            updated_on_host=0.0 if self.updaters else passes(holdings, self.ranks),
        )

    def _sums_moved(self, micro_steps: int) -> float:
        """How often the bytes of a trained weight go to the host or back while micro-batches are summed there: out at
        each one, and back in for the next."""
        if self.stage == 3:
            return self.masters * (2.0 * micro_steps - 1.0)
        return 2.0 * micro_steps - 1.0 if micro_steps > 1 else 0.0

    @property
    def _stream(self) -> int:
        """On which gradients are reduced, and what that takes is allocated: stage 3 gathers on the first."""
        return (2 if self.stage == 3 else 1) * self.buckets.overlaps

    @property
    def width(self) -> int:
        """Bytes per element of a weight on the device."""
        return 4 if self.wide else 2

    def _block(self, size: float) -> float:
        return 2.0 ** math.ceil(math.log2(size)) if self.pinned and size > 0 else size

    def trained(self, edit: Edit) -> list[int]:
        """Bytes of the trained parameters."""
        return [p.bytes for unit in (ROOT, *edit.layers) for p in edit.parameters(unit, trained=True)]

    def _bucket(self, edit: Edit, stage: str) -> Sequence[int]:
        """The reduction's buffers."""
        count = 2 if self.buckets.overlaps else 1
        return edit.allocate([self.buckets.reduce * self.width * count], Place(stage, AFTER))

    def _partition(self, edit: Edit, trained: Sequence[int], stage: str) -> Sequence[int]:
        """A rank's gradients: its flat part, or where they are copied out of the bucket all those it reaches into."""
        place = Place(stage, AFTER)
        if not self.mixed:
            reached = self._reached([self.bytes(p) for p in _trained(edit)])
            return edit.allocate([sum(reached)], place, holds=Category.GRADIENTS, stream=self._stream)
        wide = (self.masters * b for b in trained)
        return edit.allocate(wide, place, shares=self.ranks, holds=Category.GRADIENTS, stream=self._stream)

    def _reached(self, sizes: Sequence[int]) -> list[int]:
        """Of the parameters with these sizes, in order, those that overlap a rank's part of the flat buffer, at the
        rank where their sum is largest."""
        return max(([sizes[index] for index in part] for part in self._parts(sizes)), key=sum)

    def _parts(self, sizes: Sequence[int]) -> list[list[int]]:
        """For each rank, which of the parameters with these sizes, in order, overlap its part of the flat buffer."""
        ends = list(itertools.accumulate(sizes))
        share = sum(sizes) / self.ranks
        parts = [(rank * share, (rank + 1) * share) for rank in range(self.ranks)]
        spans = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        return [[i for i, (begin, end) in enumerate(spans) if end > start and begin < stop] for start, stop in parts]

    def _stay(self, edit: Edit, stage: str) -> set[int]:
        """The gradients, but for an input embedding's, that a rank keeps to the end of a backward where its part is
        summed in fp32 beside them, or on the host with more to come: its own, of those that are larger than the bucket
        (`copy_grads_in_partition`), at the rank where that is most."""
        trained = _trained(edit)
        first = next((i for i, p in enumerate(trained) if p.layer is not None), 0)
        large = [i >= first and self.bytes(p) > self.buckets.reduce * self.width for i, p in enumerate(trained)]
        parts = self._parts([self.bytes(p) for p in trained])
        own = max(
            ([trained[i] for i in part if large[i]] for part in parts), key=lambda part: sum(map(self.bytes, part))
        )
        return set(self._gradients(edit, stage, own))

    def _gradients(self, edit: Edit, stage: str, parameters: Sequence[Storage]) -> dict[int, Unit]:
        """The gradients of these parameters that a backward leaves behind, each with the unit that it belongs to."""
        made = edit.gradients(stage)
        found: dict[int, Unit] = {}
        for p in parameters:
            alike = [i for i in made[p.layer] if i not in found and edit.trace.storages[i].bytes == p.bytes]
            found.update(dict.fromkeys(alike[:1], p.layer))
        return found

    def bytes(self, parameter: Storage) -> int:
        """At the adapters' actual rank."""
        return parameter.bytes if parameter.bytes % RANK else parameter.bytes // RANK * self.rank

    def _second(self, trace: MemoryTrace, last: str) -> tuple[Edit, list[int]]:
        """Gradients go through the bucket into the rank's own partition."""
        edit = Edit(alike(trace))
        trained = self.trained(edit)
        sums: Sequence[int] = ()
        for number in (1, 2):
            stage = f"backward-{number}"
            made = {index for found in edit.gradients(stage).values() for index in found}
            stays = self.mixed if self.updaters else stage != last
            stay = self._stay(edit, stage) if stays else set()
            bucket = self._bucket(edit, stage)
            own: Sequence[int] = ()
            if self.updaters and (number == 1 or not self.mixed):
                own = self._partition(edit, trained, stage)
            at_first(edit, stage, made, [Event(index, True) for index in bucket])
            if own:
                self._first_reduction(edit, stage).extend(Event(index, True) for index in own)
            into_buckets(edit, stage, made - stay)
            end = edit.after_stage(stage)
            edit.free(end, bucket)
            self.last_reduction(edit, stage, ends=stage == last)
            edit.free(edit.after_stage(stage), sorted(stay))
            if number > 1:
                edit.free(end, own)  # added to those of the first
            else:
                sums = own
            if stage == last:
                self.norm(edit, stage)
                self._flattened(edit, stage, trained, sums)
        return edit, trained

    def _first_reduction(self, edit: Edit, stage: str) -> list[Event]:
        """A list for events at the first reduction of a backward: when a gradient no longer fits in the bucket."""
        held = 0
        for parameter in reversed(_trained(edit)):
            if held and held + self.bytes(parameter) > self.buckets.reduce * self.width:
                return edit.at_start(Place(stage, edit.layers[-1] if parameter.layer is None else parameter.layer))
            held += self.bytes(parameter)
        return edit.after_stage(stage)

    def _flattened(self, edit: Edit, stage: str, trained: Sequence[int], own: Sequence[int]) -> None:
        """Where the update takes a flat copy of a rank's gradients, they are given back once it is made (`step`)."""
        if self.updaters and not self.mixed:
            end = edit.after_stage(stage)
            edit.allocate(trained, Place(stage, AFTER), shares=self.ranks, holds=Category.GRADIENTS, events=end)
            edit.free(end, own)

    def norm(self, edit: Edit, stage: str) -> None:
        """The norm of each gradient in turn, computed on an fp64 copy: in stages 1 and 2 of every whole gradient that
        reaches into a rank's part of the flat buffer."""
        if self.updaters:
            copy = self._widest(edit).bytes * NORM_BYTES // self.width
            shares, end = self.ranks if self.stage == 3 else 1, edit.after_stage(stage)
            edit.free(end, edit.allocate([copy], Place(stage, AFTER), shares=shares, events=end))

    def _widest(self, edit: Edit) -> Storage:
        return max(_trained(edit), key=self.bytes)

    def last_reduction(self, edit: Edit, stage: str, *, ends: bool) -> None:
        """The gradient of an input embedding comes last and waits for the end of the backward (`...reduce_epilogue`,
        `independent_gradient_partition_epilogue`); no gradient is larger. Handing it on takes more of the device: in
        stage 3 its part in the format of the sums (`__avg_scatter_grads`), which are accumulated there
        (`partition_grads`), and when the accumulation `ends` with the optimizer on the host, a norm
        (`set_norm_for_param_grad_in_gpu`, `_offload_grad_partition_at_boundary`).
        """
        widest, end = self._widest(edit), edit.after_stage(stage)
        place, parted = Place(stage, AFTER), self.stage == 3
        formats = self.masters * (self.mixed + (self.pinned and not self.updaters)) if parted else 0
        beside = [widest.bytes * formats]
        if ends and not self.updaters:
            beside.append(self._in_fp64(widest))
        passing = [
            *edit.allocate([widest.bytes], place, events=end),
            *edit.allocate(beside, place, shares=self.ranks if parted else 1, stream=self._stream, events=end),
        ]
        if self.stage == 2 and self.mixed and self.updaters:  # widened to be added (`_add_to_grad_partition_buffer`)
            passing += edit.allocate([widest.bytes * self.masters], place, stream=self._stream, events=end)
        edit.free(end, passing)

    def _in_fp64(self, gradient: Storage) -> int:
        """Bytes of a gradient's fp64 copy for a norm; stage 3 copies NORM_ELEMENTS of a rank's part at a time."""
        most = NORM_ELEMENTS * self.ranks
        if self.stage == 3 and self.bytes(gradient) // self.width > most:
            return most * NORM_BYTES
        return gradient.bytes * NORM_BYTES // self.width

    def _first_mixed(self, trace: MemoryTrace, last: str) -> tuple[Edit, list[int]]:
        """fp32 gradients of the whole model exist from the start, alongside the 16-bit ones, which each backward adds
        to them and zeroes; the last one's sum is reduced in 16 bits."""
        edit = Edit(trace)
        trained = self.trained(edit)
        edit.allocate((self.masters * b for b in trained), None, holds=Category.GRADIENTS)
        end = edit.after_stage(last)
        edit.free(end, edit.allocate(trained, Place(last, AFTER), events=end))
        return edit, trained

    def _first(self, trace: MemoryTrace, last: str) -> tuple[Edit, list[int]]:
        """Gradients stay whole until the last micro-step reduces them; in mixed precision their sums are fp32
        (`_fill_param_grad_accum_attribute`), and so are the buckets. Then the rank that has the end of the model holds
        most: its own part, which is allocated with the first of it, beside what has not yet been copied there."""
        edit = Edit(trace)
        trained = self.trained(edit)
        made = [index for found in edit.gradients("backward-1").values() for index in found]
        every = _trained(edit)
        part = [every[i] for i in self._parts([self.bytes(p) for p in every])[-1]]
        copied = self._gradients(edit, "backward-1", part) if self.updaters else {}
        bucket = self._bucket(edit, last)
        if self.mixed and self.updaters:
            for index in (*made, *bucket):
                edit.trace.storages[index].bytes *= self.masters
        at_first(edit, "backward-1", set(made), [Event(index, True) for index in bucket])
        own: Sequence[int] = ()
        if self.updaters:
            own = self._partition(edit, trained, last)
            begin = self._first_reduction(edit, last)
            begin += [Event(index, True) for index in own]
            if self.mixed:
                # Reduced in 16 bits, and widened to be added (`allreduce_bucket`, `_add_to_grad_partition_buffer`).
                passing = [max(map(self.bytes, part)) * (1 + self.masters)]
                edit.free(begin, edit.allocate(passing, Place(last, AFTER), stream=self._stream, events=begin))
            for index, unit in copied.items():
                edit.free(begin if unit is ROOT else edit.at_end(Place(last, unit)), [index])
        if not self.mixed or not self.updaters:  # else they stay until the next forward (`clear_backward_seen_flag`)
            edit.free(edit.after_stage(last), [index for index in made if index not in copied])
        edit.free(edit.after_stage(last), bucket)
        self.norm(edit, last)
        self._flattened(edit, last, trained, own)
        return edit, trained


def _trained(edit: Edit) -> list[Storage]:
    """The trained parameters, in the order of the model."""
    return [p for p in in_order(edit.trace) if p.trained]


def at_first(edit: Edit, stage: str, storages: set[int], events: list[Event]) -> None:
    """Insert `events` after the first allocation of any of `storages` in a stage."""
    for place, found in edit.trace.segments:
        if place.stage == stage:
            for at, event in enumerate(found):
                if event.allocates and event.storage in storages:
                    found[at + 1 : at + 1] = events
                    return
