"""What a card reports of a step, rule by rule on timelines made by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tiny

from autofit.core.units import GIB, MIB
from autofit.estimate.estimator import Estimator
from autofit.estimate.kernels.cuda_kernels import cublas_workspace_bytes
from autofit.estimate.memory.allocator import Block, CachingAllocator, OutOfDeviceMemory
from autofit.estimate.memory.memory import cuda_memory
from autofit.estimate.memory.memory_trace import Category
from autofit.estimate.memory.replays import STEPS, Fragmentation, Replays, replay
from autofit.estimate.memory.timeline import Timeline
from autofit.techniques import complete, parse

FORWARD, BACKWARD = range(2)
JOB = tiny.job(tiny.LLAMA, hardware=tiny.CUDA_HARDWARE, seq_len=64)
WEIGHTS, PASSING = Category.WEIGHTS, Category.TEMPORARIES
WORKSPACE = 32 * MIB
CONTEXT_BYTES = 512 * MIB
memory = partial(cuda_memory, context=CONTEXT_BYTES, replays=Replays(expandable_segments=True))
Event = tuple[int, int, int, int, Category]


def event(storage: int, mib: int, phase: int = FORWARD, *, stream: int = 0, of: Category = PASSING) -> Event:
    """A storage is allocated or, with a negative size, freed."""
    return storage, mib * MIB, phase, stream, of


def line(*events: Event) -> Timeline:
    """Of one step, after which nothing happens."""
    storages, sizes, phases, streams, categories = zip(*events, strict=True)
    return Timeline(
        sizes=np.array(sizes),
        storages=np.array(storages),
        categories=np.array(categories, dtype=np.int8),
        phases=np.array(phases),
        streams=np.array(streams, dtype=np.int8),
        of_products=np.array([category is not WEIGHTS for category in categories]),
        second=len(events),
        evaluation=len(events),
        setup=sum(category is WEIGHTS and size > 0 for size, category in zip(sizes, categories, strict=True)),
    )


def reserved(*events: Event) -> int:
    """MiB, in plain segments, which are as large as what is asked for."""
    return replay(line(*events), WORKSPACE, expandable_segments=False).peak_reserved // MIB


def test_cublas_takes_a_workspace_after_the_weights_and_one_at_the_first_product_of_the_backward() -> None:
    weights, again = event(0, 10, of=WEIGHTS), (event(4, 12), event(4, -12), event(5, 14, BACKWARD))
    forward, backward = (event(1, 12), event(1, -12)), (event(2, 14, BACKWARD), event(2, -14, BACKWARD))
    assert reserved(weights, *forward) == 10 + 32 + 12
    assert reserved(weights, *forward, *backward) == 10 + 32 + 12 + 32 + 14
    assert reserved(weights, *forward, *backward, *again) == 10 + 32 + 12 + 32 + 14, "both threads have theirs"


def test_peaks_are_those_of_the_steps_and_not_of_the_set_up() -> None:
    """The set-up may take more, without counting; the hole that it leaves below the weights does."""
    set_up = (event(0, 40), event(1, 40, of=WEIGHTS), event(0, -40))
    of_all = replace(line(*set_up, event(2, 12), event(3, 30), event(3, -30)), setup=3)
    assert of_all.peak() == (40 + 12 + 30) * MIB and of_all.phase_peaks()["forward"] == of_all.peak()
    for expandable, limit in itertools.product((True, False), (None, 140 * MIB)):
        held = replay(of_all, WORKSPACE, expandable_segments=expandable, limit=limit)
        assert held.peak_allocated == of_all.peak() + WORKSPACE
        assert held.peak_reserved >= held.peak_allocated
    with pytest.raises(OutOfDeviceMemory):
        replay(of_all, WORKSPACE, limit=20 * MIB)


def test_a_workspace_stays() -> None:
    load = (event(0, 32, of=WEIGHTS), event(0, -32, of=WEIGHTS))
    assert reserved(*load, event(1, 32)) == 32 + 32
    allocator = replay(line(*load, event(1, 32), event(1, -32)), WORKSPACE)
    assert allocator.allocated == WORKSPACE


@pytest.mark.parametrize("expandable", [True, False])
def test_of_free_blocks_of_a_size_the_oldest_is_taken(expandable: bool) -> None:
    """What is split off at the front is a new block: addresses as torch 2.12 gave them for the same requests."""
    allocator = CachingAllocator(expandable_segments=expandable)
    whole, beside = allocator.allocate(52 * MIB), allocator.allocate(32 * MIB)
    allocator.release(whole)
    held = {name: allocator.allocate(mib * MIB) for name, mib in {"a": 16, "b": 2, "c": 16, "d": 2, "x": 16}.items()}
    start = held["a"].address
    for name in "xca":
        allocator.release(held[name])
    assert [(allocator.allocate(16 * MIB).address - start) // MIB for _ in "efg"] == [36, 0, 18]
    assert not beside.free


def test_steps_go_on_until_blocks_lie_as_they_will(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step is run again and again; a state that each of them replaces is that of the step before."""
    weights, state = event(0, 20, of=WEIGHTS), event(1, 4)
    step = (event(2, 30), event(3, 12), event(2, -30), event(1, -4), event(4, 4), event(3, -12))
    twice = line(weights, state, *step)
    again = replace(twice, second=2)
    assert again.renewed() == [(1, 4)]
    assert replay(again, WORKSPACE).allocated == replay(twice, WORKSPACE).allocated == (20 + 32 + 4) * MIB
    asked: list[int] = []
    allocate = CachingAllocator.allocate

    def counted(self: CachingAllocator, size: int, stream: int = 0) -> Block:
        asked.append(size)
        return allocate(self, size, stream)

    monkeypatch.setattr(CachingAllocator, "allocate", counted)
    replay(again, WORKSPACE)
    assert asked.count(30 * MIB) == 2, "one more leaves the free blocks where they were"
    asked.clear()
    places = itertools.count()
    monkeypatch.setattr(CachingAllocator, "free_blocks", lambda self: {(next(places), 1)})
    replay(again, WORKSPACE)
    assert asked.count(30 * MIB) == STEPS - 1, "the first step of this timeline is what is there before its second"


def test_what_is_freed_is_used_again_on_its_own_stream_alone() -> None:
    weights, first = event(0, 10, of=WEIGHTS), (event(1, 20, stream=1), event(1, -20, stream=1))
    assert reserved(weights, *first, event(2, 20, stream=1)) == 10 + 32 + 20
    assert reserved(weights, *first, event(2, 20)) == 10 + 32 + 20 + 20


def test_a_storage_of_a_later_step_is_another() -> None:
    assert reserved(event(0, 10, of=WEIGHTS), event(1, 12), event(1, -12), event(1, 12)) == 10 + 32 + 12


EVENTS = (
    *(event(0, 28, of=WEIGHTS), event(1, 60), event(2, 40)),
    *(event(4, 20, BACKWARD), event(1, -60, BACKWARD), event(3, 80, BACKWARD), event(3, -80, BACKWARD)),
)
HOLE = line(*EVENTS)
"""60 MiB are free in the middle when 80 are asked for."""


def test_expandable_segments_grow_at_their_end_alone() -> None:
    plain, expandable = (replay(HOLE, WORKSPACE, expandable_segments=way) for way in (False, True))
    assert plain.peak_reserved == (28 + 60 + 32 + 40 + 20 + 32 + 80) * MIB
    assert expandable.peak_reserved == (28 + 60 + 32 + 40 + 20 + 40 + 80) * MIB, "in pages of 20 MiB"


def test_within_a_limit_unused_memory_goes_back_before_the_step_fails() -> None:
    within = replay(HOLE, WORKSPACE, limit=240 * MIB)
    assert (within.peak_reserved, within.retries) == (240 * MIB, 1)
    with pytest.raises(OutOfDeviceMemory):
        replay(HOLE, WORKSPACE, limit=239 * MIB)


@pytest.mark.parametrize(
    ("capability", "kibibytes"),
    [("7.5", 8320), ("8.0", 8320), ("8.9", 8320), ("9.0", 32768), ("10.0", 32768), ("12.0", 32768)],
)
def test_a_workspace_is_as_large_as_the_capability_says(capability: str, kibibytes: int) -> None:
    workspace = cublas_workspace_bytes(capability, (2, 12))
    assert workspace == kibibytes * 1024
    found = memory(HOLE, workspace, limit=GIB)
    assert found.breakdown["temporaries"] == 40 * MIB + 20 * MIB + 80 * MIB + 2 * kibibytes * 1024


HOPPER = 32 * MIB
"""Its workspace."""


def test_what_fits_without_the_cache_fits() -> None:
    free = memory(HOLE, HOPPER, limit=GIB)
    assert free.peak_allocated_bytes == (28 + 40 + 20 + 80 + 64) * MIB
    assert free.device_bytes == 300 * MIB + CONTEXT_BYTES and not free.gives_back_cache
    tight = memory(HOLE, HOPPER, limit=240 * MIB + CONTEXT_BYTES)
    assert tight.gives_back_cache and tight.device_bytes == 240 * MIB + CONTEXT_BYTES == sum(tight.breakdown.values())
    assert tight.peak_allocated_bytes == free.peak_allocated_bytes and tight.phase_peaks == free.phase_peaks
    for less in (235, 100):  # more than is allocated, but not in whole pages; and less
        assert memory(HOLE, HOPPER, limit=less * MIB + CONTEXT_BYTES) == tight, "the least that is enough"


def test_borrowed_fragmentation_never_decides_what_fits() -> None:
    free = memory(HOLE, HOPPER, limit=GIB)
    alike = Fragmentation(share=0.5)
    too_much = memory(HOLE, HOPPER, limit=GIB, fragmentation=alike)
    assert too_much.peak_reserved_bytes == 348 * MIB == 1.5 * free.peak_allocated_bytes
    assert memory(HOLE, HOPPER, limit=320 * MIB + CONTEXT_BYTES, fragmentation=alike) == free
    enough = int(348 * MIB * (1 + alike.error)) + 1 + CONTEXT_BYTES
    assert memory(HOLE, HOPPER, limit=enough, fragmentation=alike).borrowed_error == alike.error
    assert memory(HOLE, HOPPER, limit=enough - 1, fragmentation=alike) == free, "it might be too low"
    none = Fragmentation(share=0.0)
    assert memory(HOLE, HOPPER, limit=GIB, fragmentation=none).peak_reserved_bytes == free.peak_allocated_bytes
    tight = memory(HOLE, HOPPER, limit=235 * MIB + CONTEXT_BYTES, fragmentation=none)
    assert tight.peak_reserved_bytes == 240 * MIB, "232 would fit"


def test_what_does_not_fit_in_a_lattice_is_not_replayed() -> None:
    unknown = Fragmentation(share=None)
    assert memory(HOLE, HOPPER, limit=GIB, fragmentation=unknown) == memory(HOLE, HOPPER, limit=GIB)
    least = memory(HOLE, HOPPER, limit=100 * MIB, fragmentation=unknown)
    assert least.peak_reserved_bytes == least.peak_allocated_bytes == 232 * MIB and least.borrowed_error > 0
    assert least.peak_reserved_bytes < memory(HOLE, HOPPER, limit=100 * MIB).peak_reserved_bytes == 240 * MIB


def test_a_timeline_is_replayed_once_for_each_limit() -> None:
    replays = Replays(expandable_segments=True)
    same = line(*EVENTS)
    other = line(*EVENTS[:-1], event(3, -79, BACKWARD))
    assert replays.reserved(HOLE, WORKSPACE, None) is replays.reserved(same, WORKSPACE, None)
    assert replays.reserved(other, WORKSPACE, None) is not replays.reserved(same, WORKSPACE, None)
    within = [replays.reserved(HOLE, WORKSPACE, mib * MIB) for mib in (239, 240)]
    assert [(held.reserved, held.gives_back_cache) for held in within] == 2 * [(240 * MIB, True)]


def test_an_evaluation_comes_once_and_steps_follow_it() -> None:
    """A block that only evaluation needs is taken once, and the steps after it are the second one alone."""
    step = (event(1, 30), event(1, -30))
    trains = line(event(0, 20, of=WEIGHTS), *step, event(2, 30), event(2, -30))
    ends = len(trains.sizes)
    evaluates = line(event(0, 20, of=WEIGHTS), *step, event(2, 30), event(2, -30), event(3, 50), event(3, -50))
    trains, evaluates = replace(trains, second=3), replace(evaluates, second=3, evaluation=ends)
    assert replay(trains, WORKSPACE).allocated == (20 + 32) * MIB
    assert evaluates.renewed() == [] and evaluates.peaks_in_evaluation and not trains.peaks_in_evaluation
    found = replay(evaluates, WORKSPACE)
    assert (found.peak_allocated - found.allocated) == 50 * MIB
    assert found.allocated == (20 + 32) * MIB


def test_a_step_holds_the_tokens_of_all_its_micro_batches_and_makes_their_labels() -> None:
    workload = replace(JOB.workload, global_batch=4)
    config = complete(parse("micro_batch=1,precision=fp32"))
    of_one, of_two = (
        Estimator(replace(JOB, workload=replace(workload, global_batch=batch)), None).trace(config).timeline
        for batch in (1, 2)
    )
    block = 8 * workload.seq_len
    for line, micro_batches in ((of_one, 1), (of_two, 2)):
        assert line.sizes[line.setup - 1] == micro_batches * block
        for begin, end in ((line.setup, line.second), (line.second, line.evaluation)):
            assert line.sizes[begin : begin + micro_batches].tolist() == micro_batches * [block]
            assert line.sizes[begin:end][-micro_batches:].tolist() == micro_batches * [-block]
