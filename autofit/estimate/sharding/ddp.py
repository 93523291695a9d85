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
from autofit.estimate.sharding.edit import Edit, plain
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
    tied = {index for index, home in homes.items() if home.layer == LOSS and edit.is_tied(index)}
    for index, home in homes.items():
        if index not in tied and home.stage != stage:
            at_end = (
                edit.after_stage(stage) if home.layer in (BEFORE, AFTER) else edit.at_end(home._replace(stage=stage))
            )
            edit.free(at_end, [index])
    for place, events in edit.trace.segments:
        for at, event in reversed(list(enumerate(events if place.stage == stage else ()))):
            if event.allocates and event.storage in homes and event.storage not in tied:
                hook = len(events) if place.layer in OUTSIDE else hook_of(edit.trace, events, at)
                events.insert(hook + 2, Event(event.storage, False))
    edit.free(edit.after_stage(stage), tied)


def hook_of(trace: MemoryTrace, events: Sequence[Event], at: int) -> int:
    """Where the hook runs of the gradient that is allocated at `at`."""
    return next((i for i in range(at, len(events)) if trace.storages[events[i].storage].of_hook), len(events))
