"""PyTorch's CUDA caching allocator, simulated: what a sequence of allocations and frees makes it reserve.

The rules and constants are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13) with its default settings.
Sizes are in bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import count

from autofit.core.units import MIB, round_up

MIN_BLOCK = 512
"""Every size is rounded up to a multiple of this."""
SMALL_SIZE = 1 * MIB
"""Requests up to this size are served by the small pool."""
SMALL_BUFFER, LARGE_BUFFER = 2 * MIB, 20 * MIB
"""What the small pool takes from the driver at a time, and the large pool for requests under MIN_LARGE_ALLOC; also
the pages of expandable segments."""
MIN_LARGE_ALLOC = 10 * MIB
ROUND_LARGE = 2 * MIB
"""Larger requests to the driver are rounded up to a multiple of this."""
ADDRESSES = LARGE_BUFFER << 40
"""Size of a pool's address range: more than it ever uses, and whole pages of either kind."""
SPARE_ADDRESSES = 8
"""An expandable segment has an eighth more addresses than the device has memory (ExpandableSegment)."""
FARTHEST = 1 << 80
"""Above every block's number and address."""
OLDEST_FIRST = 2, 12
"""From this release on, torch takes the oldest of the free blocks of one size; before, the one at the lowest address
(seen in benchmarks/recorded/h200 and h100)."""


class OutOfDeviceMemory(Exception):
    """The driver has no more memory, even after every unused segment was given back."""

    def __init__(self, requested: int, reserved: int) -> None:
        """The bytes requested of the driver, and those reserved then."""
        super().__init__(f"{requested} bytes requested with {reserved} reserved")
        self.needed = requested + reserved


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of a segment: in use, free, or addresses of an expandable segment without memory."""

    address: int
    size: int
    pool: _Pool
    free: bool = True
    mapped: bool = True
    """Whether memory is behind its addresses; not free where it is not."""
    before: Block | None = None
    after: Block | None = None
    number: int = field(default_factory=count().__next__)
    """Counts blocks as they are made. Of a block that is split, the rest keeps the old number."""


class _Pool:
    """The free blocks of one size class on one stream, smallest first. Blocks of equal size are in order of age with
    `oldest_first`, else by address."""

    def __init__(self, *, small: bool, address: int, oldest_first: bool) -> None:
        self.small = small
        self._oldest_first = oldest_first
        self.page = SMALL_BUFFER if small else LARGE_BUFFER
        self.address = address
        """Where the next segment starts, or the last expandable one."""
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}
        self.unmapped: list[Block] = []
        """The addresses without memory of the pool's expandable segments, lowest first."""

    def new_segment(self, size: int) -> Block:
        """The addresses of a new expandable segment, as many as whole pages take for `size`. Each lies below the last,
        as seen on emulated cards, where Linux chooses."""
        size = round_up(size, self.page)
        self.address -= size
        block = Block(self.address, size, self, free=False, mapped=False)
        self.unmapped.insert(0, block)
        return block

    def add(self, block: Block) -> None:
        key = self._key(block)
        insort(self._keys, key)
        self._blocks[key] = block

    def remove(self, block: Block) -> None:
        key = self._key(block)
        del self._keys[bisect_left(self._keys, key)]
        del self._blocks[key]

    def best_fit(self, size: int) -> Block | None:
        """The smallest free block that holds `size`, removed from the pool. A block before unmapped addresses counts as
        large as it could grow."""
        keys = self._keys
        place = bisect_left(keys, size * FARTHEST)
        if place == len(keys):
            return None
        block = self._blocks[keys[place]]
        while block.after is not None and not block.after.mapped and place + 1 < len(keys):
            larger = self._blocks[keys[place + 1]]
            if _size_when_grown(larger) >= _size_when_grown(block):
                break
            place, block = place + 1, larger
        del self._blocks[keys.pop(place)]
        return block

    def free(self) -> list[Block]:
        return [self._blocks[key] for key in self._keys]

    def _key(self, block: Block) -> int:
        return block.size * FARTHEST + (block.number if self._oldest_first else block.address)


def _size_when_grown(block: Block) -> int:
    after = block.after
    return block.size if after is None or after.mapped else block.size + after.size


class CachingAllocator:
    """One device's allocator. `limit` is what the driver can give it; None for no limit, as until it is `set_up`."""

    def __init__(
        self,
        *,
        expandable_segments: bool,
        limit: int | None = None,
        capped: bool = False,
        release: tuple[int, int] = OLDEST_FIRST,
        memory: int | None = None,
    ) -> None:
        """`capped`: set_per_process_memory_fraction has set the limit. Torch then compares it with the segment that a
        request alone would take, whatever expandable pages it maps (alloc_block). `release`: torch's. `memory`: the
        device's; without it an expandable segment never comes to its end."""
        self.expandable_segments = expandable_segments
        self._addresses = ADDRESSES if memory is None else memory + memory // SPARE_ADDRESSES
        self._oldest_first = release >= OLDEST_FIRST
        self.limit = limit
        self.capped = capped
        self.allocated = 0
        """Bytes in blocks in use, including rounding and remainders that are not split off."""
        self.reserved = 0
        """Bytes taken from the driver."""
        self.peak_allocated = 0
        self.peak_reserved = 0
        self.retries = 0
        """How often unused memory had to be given back before a request could be served."""
        self._pools: dict[tuple[int, bool], _Pool] = {}

    def allocate(self, size: int, stream: int = 0) -> Block:
        """A block for `size` bytes. Each stream has its own blocks. Raises `OutOfDeviceMemory`."""
        size = -(-size // MIN_BLOCK) * MIN_BLOCK or MIN_BLOCK
        key = stream, size <= SMALL_SIZE
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool(
                small=key[1], address=(len(self._pools) + 1) * ADDRESSES, oldest_first=self._oldest_first
            )
        block = pool.best_fit(size) or self._from_driver(pool, size)
        if block.size > size:
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def release(self, block: Block) -> None:
        """Give a block back to its pool, merged with its free neighbours."""
        self.allocated -= block.size
        block.free = True
        self._merge_free_neighbours(block)
        block.pool.add(block)

    def free_blocks(self) -> set[tuple[int, int]]:
        """Where unused memory lies: addresses and sizes."""
        return {(block.address, block.size) for pool in self._pools.values() for block in pool.free()}

    def empty_cache(self) -> None:
        """Give unused memory back to the driver: whole free segments, or all free pages of expandable ones."""
        for pool in self._pools.values():
            for block in pool.free():
                if self.expandable_segments:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def set_up(self, limit: int | None) -> None:
        """Empty the cache and start the peaks anew, as a trial does before its first step. `limit` counts from now on:
        a library that lacks memory to set up takes another way (`flatten_on_accelerator` of DeepSpeed)."""
        self.empty_cache()
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved
        self.limit = limit
        if limit is not None and self.reserved > limit:
            raise OutOfDeviceMemory(0, self.reserved)

    def _from_driver(self, pool: _Pool, size: int) -> Block:
        if self._exceeds(pool, size):
            self.retries += 1
            self.empty_cache()
            if self._exceeds(pool, size):
                raise OutOfDeviceMemory(self._bytes_compared(pool, size), self.reserved)
        needed = self._bytes_from_driver(pool, size)
        self.reserved += needed
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        if self.expandable_segments:
            return self._grow(self._expandable_run(pool, size), size)
        block = Block(pool.address, needed, pool)
        pool.address += needed
        return block

    def _exceeds(self, pool: _Pool, size: int) -> bool:
        return self.limit is not None and self.reserved + self._bytes_compared(pool, size) > self.limit

    def _bytes_compared(self, pool: _Pool, size: int) -> int:
        return _segment_bytes(pool, size) if self.capped else self._bytes_from_driver(pool, size)

    def _bytes_from_driver(self, pool: _Pool, size: int) -> int:
        """Bytes that must be taken from the driver for a request that no free block serves."""
        if not self.expandable_segments:
            return _segment_bytes(pool, size)
        needed, run_bytes, block = 0, 0, self._expandable_run(pool, size)
        while run_bytes < size:
            part = block.size if block.mapped else min(block.size, round_up(size - run_bytes, pool.page))
            needed += 0 if block.mapped else part
            run_bytes += part
            if run_bytes < size:
                assert block.after is not None
                block = block.after
        return needed

    def _expandable_run(self, pool: _Pool, size: int) -> Block:
        """The first block of the lowest run of unmapped and free blocks of an expandable segment that has addresses for
        `size`, or of a new segment. It may be the free block before the unmapped ones (find_expandable_block)."""
        for unmapped in pool.unmapped:
            preceding = unmapped.before
            first = preceding if preceding is not None and preceding.free else unmapped
            run_bytes, block = 0, first
            while run_bytes < size and (block.free or not block.mapped):
                run_bytes += block.size
                if block.after is None:
                    break
                block = block.after
            if run_bytes >= size:
                return first
        return pool.new_segment(max(size, self._addresses))

    def _grow(self, block: Block, size: int) -> Block:
        """A free block of at least `size` that starts where `block` does, on pages mapped as far as that takes."""
        pool = block.pool
        if block.mapped:
            pool.remove(block)
        else:
            self._map(block, size)
        while block.size < size:
            following = block.after
            assert following is not None
            if following.mapped:
                pool.remove(following)
            else:
                self._map(following, size - block.size)
                block.number = following.number  # the old one is part of the new
            self._absorb(block, following)
        self._merge_free_neighbours(block)
        return block

    def _map(self, block: Block, size: int) -> None:
        """Put memory behind the first pages of unmapped addresses; the others stay unmapped."""
        taken = min(block.size, round_up(size, block.pool.page))
        place = block.pool.unmapped.index(block)
        del block.pool.unmapped[place]
        if taken < block.size:
            rest = Block(block.address + taken, block.size - taken, block.pool, free=False, mapped=False)
            self._insert_after(block, rest)
            block.pool.unmapped.insert(place, rest)
            block.size = taken
        block.free = block.mapped = True

    def _unmap(self, block: Block) -> None:
        """Take the memory from the whole pages of a free block; what it has of other pages stays free."""
        pool = block.pool
        start = round_up(block.address, pool.page)
        stop = (block.address + block.size) // pool.page * pool.page
        if start >= stop:
            return
        pool.remove(block)
        end = block.address + block.size
        if start > block.address:
            middle = Block(start, end - start, pool)
            block.size = start - block.address
            block.number, middle.number = middle.number, block.number
            self._insert_after(block, middle)
            pool.add(block)
            block = middle
        if end > stop:
            rest = Block(stop, end - stop, pool)
            self._insert_after(block, rest)
            pool.add(rest)
        block.size = stop - start
        block.free = block.mapped = False
        self.reserved -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.mapped:
                pool.unmapped.remove(neighbour)
                self._absorb(block, neighbour)
        insort(pool.unmapped, block, key=lambda unmapped: unmapped.address)

    def _split(self, block: Block, size: int) -> None:
        rest_bytes = block.size - size
        splits_finely = block.pool.small or self.expandable_segments
        if not (rest_bytes >= MIN_BLOCK if splits_finely else rest_bytes > SMALL_SIZE):
            return
        remainder = Block(block.address + size, rest_bytes, block.pool)
        self._insert_after(block, remainder)
        block.size = size
        block.number, remainder.number = remainder.number, block.number
        block.pool.add(remainder)

    def _merge_free_neighbours(self, block: Block) -> None:
        """Let a block that is in no pool absorb the free ones beside it."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                block.pool.remove(neighbour)
                self._absorb(block, neighbour)

    @staticmethod
    def _insert_after(block: Block, new: Block) -> None:
        new.before, new.after = block, block.after
        if new.after is not None:
            new.after.before = new
        block.after = new

    @staticmethod
    def _absorb(block: Block, neighbour: Block) -> None:
        """Let `block` take over a neighbour's addresses."""
        if neighbour is block.before:
            block.address = neighbour.address
            block.before = neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        block.size += neighbour.size


def _segment_bytes(pool: _Pool, size: int) -> int:
    """Bytes of the segment that serves a request alone (get_allocation_size)."""
    if pool.small:
        return SMALL_BUFFER
    return LARGE_BUFFER if size < MIN_LARGE_ALLOC else round_up(size, ROUND_LARGE)
