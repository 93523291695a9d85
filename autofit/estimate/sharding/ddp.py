"""PyTorch's `DistributedDataParallel`: every rank has the whole model, and gradients are summed in buckets.

With `gradient_as_bucket_view` gradients live in the buckets (torch/csrc/distributed/c10d/reducer.cpp,
`mark_variable_ready_dense`): these exist from the start, `set_to_none` frees none of them, and a gradient that autograd
has allocated outside them, as it does wherever there is none yet, is copied in and dropped. Micro-batches before the
last one accumulate into gradients of their own.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from autofit.core.lattice import Config
from autofit.estimate.memory.memory_trace import LOSS, OUTSIDE, Category, Event, MemoryTrace, Place
from autofit.estimate.sharding.edit import ROOT, Edit, Unit, plain
from autofit.estimate.sharding.library import Holdings, Library, Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddp(Library):
    """`DistributedDataParallel` with `gradient_as_bucket_view`, which synchronises at the last micro-step."""

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
        gradients = edit.gradients("backward-1")
        every = {index for indices in gradients.values() for index in indices}
        if accumulates:
            sums_into_buckets(edit, gradients, every)
        else:
            into_buckets(edit, "backward-1", every)
        return edit.trace

    def update(self, trace: MemoryTrace, holdings: Holdings) -> MemoryTrace:
        return trace

    def traffic(self, holdings: Holdings, micro_steps: int) -> Traffic:
        return Traffic(linked=2.0 * (self.ranks - 1) / self.ranks * holdings.stored_bytes, overlapped=True)


def into_buckets(edit: Edit, stage: str, gradients: set[int]) -> None:
    """Copy every gradient into a bucket, and drop it, as soon as autograd is done with it: with that of a head which is
    the input embedding, too, at the end, when both have added to it."""
    at_end = []
    for place, events in edit.trace.segments:
        if place.stage != stage:
            continue
        for at, event in reversed(list(enumerate(events))):
            if event.allocates and event.storage in gradients:
                if _of_head(edit, event.storage) and is_tied(edit, event.storage):
                    at_end.append(event.storage)
                else:
                    end = len(events) if place.layer in OUTSIDE else end_of_operation(events, at)
                    events.insert(end, Event(event.storage, False))
    edit.free(edit.after_stage(stage), at_end)


def sums_into_buckets(edit: Edit, gradients: Mapping[Unit, Sequence[int]], which: Container[int]) -> None:
    """As `into_buckets`, in the second micro-step, those of the `gradients` of each unit that the first has left and
    that are in `which`."""
    for layer in edit.layers:
        edit.free(edit.at_end(Place("backward-2", layer)), [index for index in gradients[layer] if index in which])
    root = [index for index in gradients[ROOT] if index in which]
    heads = [index for index in root if _of_head(edit, index) and not is_tied(edit, index)]
    edit.free(edit.at_end(Place("backward-2", LOSS)), heads)
    edit.free(edit.after_stage("backward-2"), [index for index in root if index not in heads])


def end_of_operation(events: Sequence[Event], at: int) -> int:
    """Where the backward of the operation ends that allocates a gradient at `at`: it then frees what is older. Until
    then a bias's gradient is summed up beside that of its weight."""
    younger = {event.storage for event in events[at:] if event.allocates}
    return next((i + 1 for i in range(at + 1, len(events)) if events[i].storage not in younger), len(events))


def _of_head(edit: Edit, gradient: int) -> bool:
    allocated = edit.trace.storages[gradient].allocated
    return allocated is not None and allocated.layer == LOSS


def is_tied(edit: Edit, gradient: int) -> bool:
    """Whether the gradient of a head is also that of the input embedding: else there are two parameters of its size."""
    of_root = [p.bytes for p in edit.parameters(ROOT, trained=True)]
    return of_root.count(edit.trace.storages[gradient].bytes) == 1
