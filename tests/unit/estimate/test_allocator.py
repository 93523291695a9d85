"""The simulated caching allocator, rule by rule of c10/cuda/CUDACachingAllocator.cpp."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.core.units import MIB
from autofit.estimate.memory.allocator import Block, CachingAllocator, OutOfDeviceMemory


def plain(limit: int | None = None) -> CachingAllocator:
    return CachingAllocator(expandable_segments=False, limit=limit)


def expandable(limit: int | None = None) -> CachingAllocator:
    return CachingAllocator(expandable_segments=True, limit=limit)


@pytest.mark.parametrize(("asked", "booked"), [(1, 512), (512, 512), (513, 1024)])
def test_sizes_round_up_to_512_bytes(asked: int, booked: int) -> None:
    allocator = plain()
    allocator.allocate(asked)
    assert allocator.allocated == booked


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        (1 * MIB, 2 * MIB),
        (1 * MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_what_is_taken_from_the_driver(asked: int, taken: int) -> None:
    allocator = plain()
    allocator.allocate(asked)
    assert allocator.reserved == taken


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_is_left() -> None:
    allocator = plain()
    first = allocator.allocate(20 * MIB)
    allocator.release(first)
    allocator.allocate(19 * MIB)
    assert allocator.allocated == 20 * MIB, "a rest of exactly 1 MiB stays with the block"
    allocator = plain()
    allocator.release(allocator.allocate(20 * MIB))
    allocator.allocate(19 * MIB - 512)
    assert allocator.allocated == 19 * MIB - 512


def test_a_small_block_is_split_to_the_last_512_bytes() -> None:
    allocator = plain()
    for _ in range(4096):
        allocator.allocate(512)
    assert allocator.reserved == 2 * MIB == allocator.allocated


def test_the_smallest_free_block_that_holds_the_request_is_taken() -> None:
    allocator = plain()
    large, small = allocator.allocate(30 * MIB), allocator.allocate(16 * MIB)
    allocator.release(large)
    allocator.release(small)
    assert allocator.allocate(15 * MIB + 512 * 1024).address == small.address


@pytest.mark.parametrize(("release", "taken"), [((2, 11), 0), ((2, 12), 2)])
def test_among_equals_the_lowest_address_is_taken_or_the_oldest_block(release: tuple[int, int], taken: int) -> None:
    allocator = CachingAllocator(expandable_segments=False, release=release)
    allocator.release(allocator.allocate(30 * MIB))
    parts = [allocator.allocate(10 * MIB) for _ in range(3)]  # the last is what was left of the segment's first block
    places = [part.address for part in parts]
    allocator.release(parts[0])
    allocator.release(parts[2])
    assert allocator.allocate(10 * MIB).address == places[taken]


def test_freed_neighbours_of_a_segment_become_one_block() -> None:
    allocator = plain()
    parts = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for part in (parts[0], parts[2], parts[1], parts[3]):
        allocator.release(part)
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 20 * MIB


def test_segments_do_not_merge_with_each_other() -> None:
    allocator = plain()
    a, b = allocator.allocate(20 * MIB), allocator.allocate(20 * MIB)
    allocator.release(a)
    allocator.release(b)
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 80 * MIB


def test_small_and_large_requests_have_pools_of_their_own() -> None:
    allocator = plain()
    allocator.release(allocator.allocate(20 * MIB))
    allocator.allocate(1024)
    assert allocator.reserved == 22 * MIB


def test_reserved_falls_only_when_the_driver_has_no_more() -> None:
    allocator = plain(limit=60 * MIB)
    kept = allocator.allocate(20 * MIB)
    allocator.release(allocator.allocate(30 * MIB))
    assert allocator.reserved == 50 * MIB
    allocator.allocate(40 * MIB)
    assert (allocator.reserved, allocator.retries) == (60 * MIB, 1)
    with pytest.raises(OutOfDeviceMemory) as caught:
        allocator.allocate(2 * MIB)
    assert caught.value.needed == 80 * MIB, "a segment of 20 MiB has no room"
    allocator.release(kept)
    allocator.allocate(20 * MIB)


@pytest.mark.parametrize(("asked", "taken"), [(1024, 2 * MIB), (3 * MIB, 20 * MIB), (41 * MIB, 60 * MIB)])
def test_expandable_segments_grow_by_pages(asked: int, taken: int) -> None:
    allocator = expandable()
    allocator.allocate(asked)
    assert (allocator.reserved, allocator.allocated) == (taken, asked)


def test_an_expandable_segment_grows_behind_what_is_free_at_its_end() -> None:
    allocator = expandable()
    kept, end = allocator.allocate(20 * MIB), allocator.allocate(20 * MIB)
    allocator.release(end)
    grown = allocator.allocate(40 * MIB)
    assert grown.address == end.address
    assert allocator.reserved == 60 * MIB, "a plain segment would have taken 40 MiB more"
    allocator.release(kept)
    allocator.release(grown)
    assert allocator.allocate(60 * MIB).address == kept.address


def test_the_end_of_an_expandable_segment_is_taken_last() -> None:
    allocator = expandable()
    hole, _, end = allocator.allocate(40 * MIB), allocator.allocate(20 * MIB), allocator.allocate(20 * MIB)
    allocator.release(hole)
    allocator.release(end)
    assert allocator.allocate(20 * MIB).address == hole.address, "though the end fits more closely"


def test_an_expandable_segment_is_split_finely() -> None:
    allocator = expandable()
    allocator.release(allocator.allocate(20 * MIB))
    allocator.allocate(19 * MIB + 512 * 1024)
    allocator.allocate(2 * MIB)
    assert allocator.reserved == 40 * MIB, "half a mebibyte was left, and the second request continues in it"


def test_the_free_end_of_an_expandable_segment_goes_back_before_running_out() -> None:
    allocator = expandable(limit=62 * MIB)
    allocator.release(allocator.allocate(60 * MIB))
    allocator.allocate(1024)
    assert allocator.reserved == 62 * MIB
    allocator = expandable(limit=60 * MIB)
    allocator.release(allocator.allocate(60 * MIB))
    allocator.allocate(1024)
    assert (allocator.reserved, allocator.retries) == (2 * MIB, 1)


def test_free_pages_in_the_middle_of_an_expandable_segment_go_back_too_and_are_used_again() -> None:
    allocator = expandable(limit=100 * MIB)
    hole, kept = allocator.allocate(50 * MIB), allocator.allocate(30 * MIB)
    allocator.release(hole)
    grown = allocator.allocate(60 * MIB)
    assert grown.address > kept.address
    assert (allocator.reserved, allocator.retries) == (100 * MIB, 1), "two pages of the hole, whose third is in use"
    allocator.release(grown)
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB
    again = allocator.allocate(50 * MIB)
    assert again.address == hole.address and allocator.reserved == 80 * MIB


def test_each_stream_has_blocks_of_its_own_within_one_limit() -> None:
    allocator = expandable(limit=60 * MIB)
    allocator.release(allocator.allocate(40 * MIB, 1))
    allocator.allocate(20 * MIB, 2)
    assert (allocator.reserved, allocator.retries) == (60 * MIB, 0)
    allocator.allocate(20 * MIB, 2)
    assert (allocator.reserved, allocator.retries) == (40 * MIB, 1), "what one stream has cached goes back for another"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40 * MIB), st.booleans(), st.integers(0, 1000)), max_size=60),
    st.booleans(),
    st.sampled_from([None, 100 * MIB]),
)
def test_blocks_never_overlap_and_the_counters_add_up(
    steps: list[tuple[int, bool, int]], expands: bool, limit: int | None
) -> None:
    allocator = CachingAllocator(expandable_segments=expands, limit=limit)
    alive: list[Block] = []
    for size, release, which in steps:
        if release and alive:
            allocator.release(alive.pop(which % len(alive)))
        else:
            try:
                alive.append(allocator.allocate(size, which % 2))
            except OutOfDeviceMemory as error:
                assert limit is not None and error.needed > limit - 20 * MIB
        assert allocator.allocated == sum(b.size for b in alive) <= allocator.reserved
        assert limit is None or allocator.reserved <= limit
        spans = sorted((b.address, b.address + b.size) for b in alive)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for block in alive:
        allocator.release(block)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_an_expandable_segment_ends_an_eighth_beyond_the_devices_memory() -> None:
    """As torch 2.12 did on a card that gave memory back: the last block is not as large as it might grow."""
    allocator = CachingAllocator(expandable_segments=True, memory=800 * MIB)
    apart = [allocator.allocate(mib * MIB) for mib in (300, 20, 200, 20)]
    allocator.release(apart[0])
    allocator.release(apart[2])
    allocator.empty_cache()
    held = allocator.allocate(260 * MIB)
    assert held.address == apart[0].address, "addresses whose memory was given back are used again"
    last = allocator.allocate(280 * MIB)
    assert last.address == apart[3].address + 20 * MIB
    allocator.release(held)
    allocator.release(last)
    assert allocator.allocate(250 * MIB).address == held.address
    allocator.allocate(290 * MIB)
    beyond = allocator.allocate(210 * MIB)
    assert beyond.address < held.address, "a new segment, as only 200 and 70 MiB of addresses are left"


def test_a_block_may_grow_to_the_end_of_its_segment() -> None:
    def taken(memory: int | None) -> int:
        allocator = CachingAllocator(expandable_segments=True, memory=memory)
        large, _, small = (allocator.allocate(mib * MIB) for mib in (300, 20, 200))
        allocator.release(large)
        allocator.release(small)
        return allocator.allocate(200 * MIB).address - large.address

    assert taken(None) == 0, "the smaller one could grow without end, and counts as larger"
    assert taken(480 * MIB) == 320 * MIB
