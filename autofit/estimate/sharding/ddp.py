"""PyTorch's `DistributedDataParallel`: every rank has the whole model, and gradients are summed in buckets.

With `gradient_as_bucket_view` gradients live in the buckets (torch/csrc/distributed/c10d/reducer.cpp,
`mark_variable_ready_dense`): these exist from the start, `set_to_none` frees none of them, and a gradient that autograd
has allocated outside them, as it does wherever there is none yet, is copied in and dropped. Micro-batches before the
last one accumulate into gradients of their own. Without it every gradient stays where autograd has put it: it is copied
into its bucket and, once that is summed, back (`finalize_bucket_dense`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autofit.core.lattice import Config
from autofit.estimate.memory.memory_trace import AFTER, BEFORE, LOSS, OUTSIDE, Category, Event, MemoryTrace, Place
from autofit.estimate.sharding.edit import ROOT, Edit, plain
from autofit.estimate.sharding.library import Holdings, Library, Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddp(Library):
    """`DistributedDataParallel`, which synchronises at the last micro-step."""

    views: bool
    """Whether gradients are views of the buckets (`gradient_as_bucket_view`)."""

    @property
    def updaters(self) -> int:
        return 1

    @property
    def converts(self) -> bool:
        return False

    def traced(self, config: Config) -> Config:
        return plain(config)

    def micro_steps(self, trace: MemoryTrace, *, accumulates: bool) -> MemoryTrace:
        """The trace with the buckets added, into which the last micro-step moves the gradients as they come."""
        edit = Edit(trace)
        edit.allocate(edit.trained_sizes(), None, holds=Category.GRADIENTS)
        if not self.views:
            return edit.trace
        into_buckets(edit, "backward-2" if accumulates else "backward-1", edit.all_gradients("backward-1"))
        return edit.trace

    def update(self, trace: MemoryTrace, holdings: Holdings) -> MemoryTrace:
        return trace

    def traffic(self, holdings: Holdings, micro_steps: int) -> Traffic:
        return Traffic(linked=2.0 * (self.ranks - 1) / self.ranks * holdings.stored_bytes, overlapped=True)


def into_buckets(edit: Edit, stage: str, gradients: set[int]) -> None:
    """Copy every gradient into a bucket, and drop it, as soon as autograd is done with it: with that of a head which is
    the input embedding, too, at the end, when both have added to it; with those of an earlier micro-step, to which this
    one adds, at the end of their layer."""
    homes = {index: edit.trace.storages[index].allocated or Place(stage, AFTER) for index in gradients}
    tied = {index for index, home in homes.items() if home.layer == LOSS and is_tied(edit, index)}
    for index, home in homes.items():
        if index not in tied and home.stage != stage:
            at_end = (
                edit.after_stage(stage) if home.layer in (BEFORE, AFTER) else edit.at_end(home._replace(stage=stage))
            )
            edit.free(at_end, [index])
    for place, events in edit.trace.segments:
        for at, event in reversed(list(enumerate(events if place.stage == stage else ()))):
            if event.allocates and event.storage in homes and event.storage not in tied:
                end = len(events) if place.layer in OUTSIDE else end_of_operation(events, at)
                events.insert(end, Event(event.storage, False))
    edit.free(edit.after_stage(stage), tied)


def end_of_operation(events: Sequence[Event], at: int) -> int:
    """Where the backward of the operation ends that allocates a gradient at `at`: after it has freed what was there
    before and is no longer needed. Until then a bias's gradient is summed up beside that of its weight."""
    since = {event.storage for event in events[at:] if event.allocates}
    frees = next((i for i in range(at + 1, len(events)) if events[i].storage not in since), len(events))
    return next((i for i in range(frees, len(events)) if events[i].allocates), len(events))


def hook_of(events: Sequence[Event], at: int) -> int:
    """Where the hook of the gradient runs that is allocated at `at`, at the end of its operation: before it is dropped,
    if it is."""
    end, dropped = end_of_operation(events, at), Event(events[at].storage, False)
    return events.index(dropped, at, end) if dropped in events[at:end] else end


def is_tied(edit: Edit, gradient: int) -> bool:
    """Whether the gradient of a head is also that of the input embedding: else there are two parameters of its size."""
    of_root = [p.bytes for p in edit.parameters(ROOT, trained=True)]
    return of_root.count(edit.trace.storages[gradient].bytes) == 1
