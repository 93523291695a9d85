"""DeepSpeed's ZeRO: flat partitions of master weights and states, gradients reduced through buckets of fixed size.

What the stages have in common, and when the buffers of stages 1 and 2 come and go (those of stage 3: zero_third.py).
Taken from deepspeed 0.19.8: runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py, and for stage 1 with bf16 weights
runtime/bf16_optimizer.py, which keeps fp32 gradients of the whole model (`_setup_for_real_optimizer`).

* Trained weights lie in one flat buffer, of which stage 3 keeps its own part.
* `setup_buckets` allocates a bucket in full however small the model is.
* Gradients are summed over micro-batches in fp32 where weights are 16-bit and their masters fp32 (`sums_in_fp32` of
  techniques/deepspeed_settings.py): stage 2 has a flat partition for that from the first reduction on
  (`_get_compact_grad_partition_buffer`), stage 3 from the start (`grad_partitions_flat_buffer`).
* Where masters have the weights' own format, stage 2 copies its part out of the bucket at every micro-batch
  (`copy_grads_in_partition`), and `step` makes one more flat copy.
* With the optimizer on the host the sums are there, too (`async_accumulate_grad_in_cpu_via_gpu`).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, takewhile

from autofit.estimate.memory.memory_trace import (
    AFTER,
    BEFORE,
    LOSS,
    SETUP,
    Category,
    Event,
    MemoryTrace,
    Place,
    Storage,
)
from autofit.estimate.memory.symbolic_sizes import RANK
from autofit.estimate.sharding.ddp import hook_of, into_buckets
from autofit.estimate.sharding.edit import ROOT, Edit, Unit, alike, loaded_in_order
from autofit.estimate.sharding.zero_amounts import ZeroAmounts

NORM_BYTES = 8
"""Per element of a gradient while its norm is computed (`get_norm_dtype` of runtime/zero/utils.py)."""
NORM_ELEMENTS = 250_000_000
"""Elements of a gradient that stage 3 widens at a time, where the optimizer is on the host (`buffer_size` of
`_constant_buffered_norm2`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero(ZeroAmounts):
    """Stage 1 or 2 of ZeRO, with the optimizer in host memory or not; and what stage 3 shares with them."""

    part: int | None = -1
    """Of the parts of the flat buffer, the one of the rank whose step it is; None for that of the largest parameters
    together."""

    @property
    def extremes(self) -> Sequence[Zero]:
        """The last rank, whose parameters have their gradients first, allocates its partition early; in stage 1 the
        first one still holds the other ranks' large gradients when it allocates its own. With fp32 gradients of the
        whole model in stage 1, all ranks are alike, as in stage 3 and with the optimizer on the host."""
        if not self.updaters or self.stage == 3 or (self.stage == 1 and self._keeps_wide_gradients):
            return (replace(self, part=None),)
        return tuple(replace(self, part=part) for part in ((-1, 0) if self.ranks == 2 else (-1, 0, None)))

    @property
    def _keeps_wide_gradients(self) -> bool:
        return self.mixed and self.bf16

    def micro_steps(self, trace: MemoryTrace, *, accumulates: bool) -> MemoryTrace:
        last = "backward-2" if accumulates else "backward-1"
        if self.stage == 2:
            edit, trained = self._second(trace, last)
        elif self._keeps_wide_gradients and self.updaters:
            edit, trained = self._first_mixed(trace, last)
        else:
            edit, trained = self._first(trace, last)
        if self.pinned:
            self._set_up(edit)
            self._make_masters(edit, trained)
        elif self.updaters:
            edit.allocate((self.masters * b for b in trained), None, shares=self.ranks, holds=Category.OPTIMIZER)
        if not self.updaters:  # temp_grad_buffer_for_gpu_offload
            edit.allocate([max(trained, default=0)], None)
        return edit.trace

    def _make_masters(self, edit: Edit, trained: Sequence[int]) -> None:
        """A rank's master weights are made from a copy of its part, or are that copy where their format is the same."""
        place, events = edit.trace.segments[0]
        copied = self.mixed or not self.updaters
        copy = edit.allocate(trained, place, shares=self.ranks, events=events) if copied else ()
        if self.updaters:
            wide = [self.masters * b for b in trained]
            edit.allocate(wide, place, shares=self.ranks, holds=Category.OPTIMIZER, events=events)
        edit.free(events, copy)

    def _set_up(self, edit: Edit) -> None:
        """Parameters are loaded as `_loaded_bytes` says and replaced once their layer is there (`ZeroSharder`), those
        outside the layers at the end. Then what is trained moves to its flat buffer (`flatten_on_accelerator`, in stage
        3 `defragment`), and leaves holes between the others."""
        place, indices = Place(SETUP, BEFORE), {id(storage): index for index, storage in enumerate(edit.trace.storages)}
        events: list[Event] = []
        of_root: list[tuple[int, Sequence[int]]] = []

        def replaced(loaded: list[tuple[int, Sequence[int]]]) -> None:
            for index, at_first in loaded:
                events.append(Event(index, True))
                edit.free(events, at_first)

        for layer, storages in groupby(loaded_in_order(edit.trace), key=lambda storage: storage.layer):
            loaded = of_root if layer is ROOT else []
            for storage in storages:
                index, size = indices[id(storage)], self._loaded_bytes(storage)
                if size is None:
                    events.append(Event(index, True))
                else:
                    loaded.append((index, edit.allocate([size], place, events=events)))
            if layer is not ROOT:
                replaced(loaded)
        replaced(of_root)
        flat = [p for p in edit.trained() if not self._persists(p)]
        shares = self.ranks if self.stage == 3 else 1
        if self.stage == 2 or (self.stage == 1 and not (self._keeps_wide_gradients and self.updaters)):
            edit.empty_cache(place, events)  # not in bf16_optimizer.py
        edit.allocate([p.bytes for p in flat], place, shares=shares, holds=Category.WEIGHTS, events=events)
        edit.free(events, [indices[id(parameter)] for parameter in flat])
        edit.trace.segments.insert(0, (place, events))

    def _loaded_bytes(self, storage: Storage) -> int | None:
        """Of what is loaded in another form than it stays in: trained parameters are wide in mixed precision."""
        return self.masters * storage.bytes if storage.trained and self.mixed else None

    def _persists(self, storage: Storage) -> bool:
        """Whether stage 3 leaves a parameter whole."""
        return False

    @property
    def _stream(self) -> int:
        """On which gradients are reduced, and what that takes is allocated: stage 3 gathers on the first."""
        return (2 if self.stage == 3 else 1) * self.buckets.overlaps

    def _fits_bucket(self, gradient: Storage) -> bool:
        return self.bytes(gradient) <= self._bucket_bytes

    @property
    def _bucket_bytes(self) -> int:
        """A gradient that is larger is reduced by itself; others are copied into a bucket of this size, and dropped
        (`reduce_independent_p_g_buckets_and_remove_grads`)."""
        return self.buckets.reduce * self.width

    def _bucket(self, edit: Edit, stage: str) -> Sequence[int]:
        """The reduction's buffers."""
        place, buffers = Place(stage, AFTER), 1 + self.buckets.overlaps
        return [index for _ in range(buffers) for index in edit.allocate([self._bucket_bytes], place)]

    def _partition(self, edit: Edit, trained: Sequence[int], stage: str) -> Sequence[int]:
        """A rank's gradients: its flat part, or where they are copied out of the bucket all those it reaches into."""
        place = Place(stage, AFTER)
        if not self.mixed:
            reached = sum(self.bytes(p) for p, _ in self._own(edit))
            return edit.allocate([reached], place, holds=Category.GRADIENTS, stream=self._stream)
        wide = (self.masters * b for b in trained)
        return edit.allocate(wide, place, shares=self.ranks, holds=Category.GRADIENTS, stream=self._stream)

    def _stay(self, edit: Edit, stage: str) -> set[int]:
        """The gradients that a rank keeps to the end of a backward, where its part is summed in fp32 beside them, or on
        the host with more to come (`copy_grads_in_partition`). They are its own, of those larger than the bucket. An
        input embedding's is not among them."""
        trained = edit.trained()
        leading = {id(p) for p in takewhile(lambda p: p.layer is None, trained)}
        kept = [p for p, _ in self._own(edit) if id(p) not in leading and not self._fits_bucket(p)]
        return set(self._gradients(edit, stage, kept))

    def _gradients(self, edit: Edit, stage: str, parameters: Sequence[Storage]) -> dict[int, Unit]:
        """The gradients of these parameters that a backward leaves behind, each with the unit that it belongs to. Of
        parameters of one size in a unit, the last has its gradient first."""
        gradients, wanted = edit.gradients(stage), set(map(id, parameters))
        units: dict[int, Unit] = {}
        for p in reversed(edit.trained()):
            left = gradients[p.layer]
            index = next((i for i in left if edit.trace.storages[i].bytes == p.bytes), None)
            if index is not None:
                left.remove(index)
                if id(p) in wanted:
                    units[index] = p.layer
        return units

    def bytes(self, parameter: Storage) -> int:
        """At the adapters' actual rank."""
        return parameter.bytes if parameter.bytes % RANK else parameter.bytes // RANK * self.rank

    def _second(self, trace: MemoryTrace, last: str) -> tuple[Edit, list[int]]:
        """Gradients go through the bucket into the rank's own partition."""
        edit = Edit(alike(trace))
        trained = edit.trained_sizes()
        sums: Sequence[int] = ()
        for number in (1, 2):
            stage = f"backward-{number}"
            gradients = edit.all_gradients(stage)
            stays = self.mixed if self.updaters else stage != last
            stay = self._stay(edit, stage) if stays else set()
            bucket = self._bucket(edit, stage)
            partition: Sequence[int] = ()
            if self.updaters and (number == 1 or not self.mixed):
                partition = self._partition(edit, trained, stage)
            large = {i for i in gradients - stay if not self._fits_bucket(edit.trace.storages[i])}
            into_buckets(edit, stage, gradients - stay - large)
            waiting = {i for i in large if edit.is_embeddings(i)}
            _drop_as_next_comes(edit, stage, gradients, large - waiting)
            at_first(edit, stage, gradients, [Event(index, True) for index in bucket])
            if partition:
                own = self._gradients(edit, stage, [p for p, _ in self._own(edit)])
                self._at_first_reduction(edit, stage, gradients, own, [Event(index, True) for index in partition])
            end = edit.after_stage(stage)
            self.last_reduction(edit, stage, ends=stage == last, of=waiting)
            # In the order of parameters, of which the last ones are in the bucket (`_clear_param_grad_only`).
            edit.free(end, [*sorted(stay, reverse=True), *reversed(bucket)])
            if number > 1:
                edit.free(end, partition)  # added to those of the first
            else:
                sums = partition
            if stage == last:
                self.norm(edit, stage)
                self._flattened(edit, stage, trained, sums)
        return edit, trained

    def _at_first_reduction(
        self, edit: Edit, stage: str, gradients: Container[int], own: Container[int], events: list[Event]
    ) -> None:
        """Insert `events` where a backward first reduces a bucket with any of the rank's `own` gradients: when another
        of all `gradients` no longer fits in. Gradients that are added to those of the first micro-step come in its
        order, at the start of the layers that they have there."""
        held, is_own = 0, False
        for place, of_place in edit.trace.segments:
            for at, event in enumerate(of_place):
                if event.allocates and event.storage in gradients:
                    if place.layer == LOSS and edit.is_tied(event.storage):  # it comes last, with the embedding's
                        continue
                    size = self.bytes(edit.trace.storages[event.storage])
                    if held and held + size > self._bucket_bytes:
                        if is_own:
                            if place.stage == stage:
                                hook = hook_of(edit.trace, of_place, at)
                                of_place[hook:hook] = events
                            else:
                                edit.at_start(Place(stage, place.layer)).extend(events)
                            return
                        held = 0
                    held, is_own = held + size, is_own or event.storage in own
        edit.after_stage(stage).extend(events)

    def _flattened(self, edit: Edit, stage: str, trained: Sequence[int], partition: Sequence[int]) -> None:
        """Where the update takes a flat copy of a rank's gradients, they are given back once it is made (`step`)."""
        if self.updaters and not self.mixed:
            place, events = edit.before_update(stage)
            edit.allocate(trained, place, shares=self.ranks, holds=Category.GRADIENTS, events=events)
            edit.free(events, partition)

    def norm(self, edit: Edit, stage: str) -> None:
        """The norm of each gradient in turn, computed on an fp64 copy: of what is in the rank's part of the flat buffer
        (`get_flat_partition`), in stage 3 of the rank's part of every gradient."""
        if self.updaters:
            place, events = edit.before_update(stage)
            shares = self.ranks if self.stage == 3 else 1
            largest = self._widest(edit.trained()).bytes if self.stage == 3 else self._largest_part(edit)
            copy = largest * NORM_BYTES // self.width
            edit.free(events, edit.allocate([copy], place, shares=shares, events=events))

    def _largest_part(self, edit: Edit) -> int:
        """Bytes of the largest gradient in the rank's part of the flat buffer, as far as it lies there."""
        parameter, part = max(self._own(edit), key=lambda own: own[1])
        return _part_of(parameter, self.bytes(parameter), part)

    def _own(self, edit: Edit) -> list[tuple[Storage, int]]:
        """The trained parameters that reach into the rank's part of the flat buffer, and by how many bytes."""
        trained = edit.trained()
        sizes = [self.bytes(p) for p in trained]
        parts = self.parts(sizes)
        own = max(parts, key=lambda part: sum(sizes[i] for i in part)) if self.part is None else parts[self.part]
        return [(trained[i], overlap) for i, overlap in own.items()]

    def _widest(self, parameters: Iterable[Storage]) -> Storage:
        return max(parameters, key=self.bytes)

    def last_reduction(self, edit: Edit, stage: str, *, ends: bool, of: Collection[int] = ()) -> None:
        """The gradient `of` an input embedding comes last and waits for the end of the backward (`...reduce_epilogue`,
        `independent_gradient_partition_epilogue`); no gradient is larger. Handing it on takes more of the device: in
        stage 3 its part in the format of the sums (`__avg_scatter_grads`), which are accumulated there
        (`partition_grads`), and when the accumulation `ends` with the optimizer on the host, a norm
        (`set_norm_for_param_grad_in_gpu`, `_offload_grad_partition_at_boundary`).
        """
        widest, end = self._widest(edit.trained()), edit.after_stage(stage)
        place, parted = Place(stage, AFTER), self.stage == 3
        formats = self.masters * (self.mixed + (self.pinned and not self.updaters)) if parted else 0
        copies = [widest.bytes * formats]
        if ends and not self.updaters:
            copies.append(self._in_fp64(widest))
        passing = [
            *(of or edit.allocate([widest.bytes], place, events=end)),
            *edit.allocate(copies, place, shares=self.ranks if parted else 1, stream=self._stream, events=end),
        ]
        if self.stage == 2 and self.mixed and self.updaters:  # widened to be added (`_add_to_grad_partition_buffer`)
            wide = self._largest_part(edit) * self.masters
            passing += edit.allocate([wide], place, stream=self._stream, events=end)
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
        trained = edit.trained_sizes()
        edit.allocate((self.masters * b for b in trained), None, holds=Category.GRADIENTS)
        end = edit.after_stage(last)
        edit.free(end, edit.allocate(trained, Place(last, AFTER), events=end))
        return edit, trained

    def _first(self, trace: MemoryTrace, last: str) -> tuple[Edit, list[int]]:
        """Gradients stay whole until the last micro-step reduces them. In mixed precision their sums are fp32
        (`_fill_param_grad_accum_attribute`), and so are the buckets; others' stay until the next forward
        (`clear_backward_seen_flag`). Those that fit leave through the bucket as they come; without overlap, after the
        backward (`grad_handling_hook`, `reduce_gradients`)."""
        edit = Edit(trace)
        trained, widens, overlaps = edit.trained_sizes(), self.mixed and self.updaters > 0, self.buckets.overlaps
        if widens:
            _separate_head(edit)
        gradients = edit.all_gradients("backward-1")
        leave = {i for i in gradients if overlaps and self._fits_bucket(edit.trace.storages[i])}
        bucket = self._bucket(edit, last)
        into_buckets(edit, last, leave)
        at_first(edit, "backward-1", gradients, [Event(index, True) for index in bucket])
        partition: Sequence[int] = ()
        copied: set[int] = set()
        if self.updaters:
            partition = self._partition(edit, trained, last)
            copied = self._copied(edit, last, gradients - leave, partition)
        if widens:
            for index in (*gradients, *bucket):
                edit.trace.storages[index].bytes *= self.masters
        else:
            edit.free(edit.after_stage(last), [*(gradients - leave - copied), *reversed(bucket)])
        self.norm(edit, last)
        self._flattened(edit, last, trained, partition)
        return edit, trained

    def _copied(self, edit: Edit, last: str, large: set[int], partition: Sequence[int]) -> set[int]:
        """Of the `large` gradients, a rank's own, which it copies into its `partition` when the next comes, and drops.
        That is allocated with the first reduction that reaches into it, beside what has not yet been copied."""
        own = self._gradients(edit, "backward-1", [p for p, _ in self._own(edit)])
        homes = {i: edit.trace.storages[i].allocated for i in own}
        late = {i for i, home in homes.items() if home == Place("backward-1", BEFORE)}
        begin = [Event(index, True) for index in partition]
        if self.mixed:
            self._reduce(edit, last, own.keys() - late, begin)
        outside = {i for i, unit in own.items() if unit is ROOT or not self.buckets.overlaps} & large - late
        edit.free(begin, outside)
        if self.buckets.overlaps:
            # As if others' gradients filled no bucket: with them, recorded ranks are predicted to take 0.1 % less.
            self._at_first_reduction(edit, last, own, own, begin)
        else:
            edit.after_stage(last).extend(begin)
        _drop_as_next_comes(edit, last, large, own.keys() & large - late - outside)
        end = edit.after_stage(last)
        if self.mixed:
            self._reduce(edit, last, late, end)
        edit.free(end, late & large)
        return own.keys() & large

    def _reduce(self, edit: Edit, stage: str, gradients: Iterable[int], events: list[Event]) -> None:
        """The largest of these gradients is reduced in 16 bits, and widened to be added (`allreduce_bucket`,
        `_add_to_grad_partition_buffer`)."""
        size = max((self.bytes(edit.trace.storages[i]) for i in gradients), default=0) * (1 + self.masters)
        edit.free(events, edit.allocate([size], Place(stage, AFTER), stream=self._stream, events=events))


def _part_of(parameter: Storage, size: int, part: int) -> int:
    """`part` of a parameter's `size`, both at the adapters' rank, at that of the trace."""
    unit = 1 if parameter.bytes % RANK else RANK
    return parameter.bytes // unit * part // size * unit


def _drop_as_next_comes(edit: Edit, stage: str, gradients: set[int], dropped: Iterable[int]) -> None:
    """Free those that are `dropped` of the `gradients` where the hook of the next one runs; those of an earlier
    micro-step, to which this one adds, at the end of their layer."""
    left = set(dropped)
    arrivals = [
        (events, at, event.storage)
        for place, events in edit.trace.segments
        if place.stage == stage
        for at, event in enumerate(events)
        if event.allocates and event.storage in gradients
    ]
    for (_, _, gradient), (events, at, _) in reversed(list(pairwise(arrivals))):
        if gradient in left:
            events.insert(hook_of(edit.trace, events, at) + 2, Event(gradient, False))
            left.remove(gradient)
    for index in left:
        home = edit.trace.storages[index].allocated
        edit.free(edit.at_end(Place(stage, home.layer if home else AFTER)), [index])


def _separate_head(edit: Edit) -> None:
    """A head's gradient is made with the loss, in its format, and becomes that of the parameter where autograd is done
    with it: where the parameter is the input embedding, too, at the end of the backward."""
    stage = "backward-1"
    for made in edit.gradients(stage)[ROOT]:
        storage = edit.trace.storages[made]
        if storage.allocated == Place(stage, LOSS):
            tied = edit.is_tied(made)
            end = edit.after_stage(stage) if tied else edit.at_end(storage.allocated)
            edit.allocate([storage.bytes], Place(stage, BEFORE if tied else AFTER), events=end)
            edit.free(end, [made])
            storage.freed = Place(stage, AFTER)


def at_first(edit: Edit, stage: str, storages: set[int], events: list[Event]) -> None:
    """Insert `events` in the hook of the first of the gradients `storages` in a stage."""
    for place, segment in edit.trace.segments:
        if place.stage == stage:
            for at, event in enumerate(segment):
                if event.allocates and event.storage in storages:
                    hook = hook_of(edit.trace, segment, at)
                    segment[hook:hook] = events
                    return
