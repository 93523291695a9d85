"""PyTorch's CUDA caching allocator, simulated: what a sequence of allocations and frees makes it reserve.

The rules and constants are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13) for one stream, with its
default settings. Sizes are in bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 1024**2
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


class OutOfDeviceMemory(Exception):
    """The driver has no more memory, even after every unused segment was given back."""

    def __init__(self, requested: int, reserved: int) -> None:
        super().__init__(f"{requested} bytes requested with {reserved} reserved")
        self.requested = requested
        self.reserved = reserved


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of a segment, in use or free."""

    address: int
    size: int
    pool: _Pool
    free: bool = True
    before: Block | None = None
    after: Block | None = None


class _Pool:
    """The free blocks of one size class, smallest first and, among equals, lowest address first."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self._keys: list[tuple[int, int]] = []
        self._blocks: dict[tuple[int, int], Block] = {}

    def add(self, block: Block) -> None:
        key = (block.size, block.address)
        insort(self._keys, key)
        self._blocks[key] = block

    def remove(self, block: Block) -> None:
        key = (block.size, block.address)
        del self._keys[bisect_left(self._keys, key)]
        del self._blocks[key]

    def best_fit(self, size: int, tail: Block | None) -> Block | None:
        """The smallest free block that holds `size`, removed from the pool.

        `tail`, the end of an expandable segment, counts as infinite: any other block that is large enough goes first.
        """
        place = bisect_left(self._keys, (size, -1))
        if place == len(self._keys):
            return None
        if self._blocks[self._keys[place]] is tail and place + 1 < len(self._keys):
            place += 1
        return self._blocks.pop(self._keys.pop(place))

    def whole_segments(self) -> list[Block]:
        """Free blocks that each make up a whole segment."""
        return [b for b in self._blocks.values() if b.before is None and b.after is None]


class CachingAllocator:
    """One device's allocator. `limit` is what the driver can give it; None for no limit."""

    def __init__(self, *, expandable_segments: bool, limit: int | None = None) -> None:
        self.expandable_segments = expandable_segments
        self.limit = limit
        self.allocated = 0
        """In blocks in use, including rounding and remainders that are not split off."""
        self.reserved = 0
        """Taken from the driver."""
        self.peak_allocated = 0
        self.peak_reserved = 0
        self.retries = 0
        """How often unused segments had to be given back before a request could be served."""
        self._pools = {True: _Pool(small=True), False: _Pool(small=False)}
        self._tails: dict[bool, Block | None] = {True: None, False: None}
        """The last block of each pool's expandable segment."""
        self._next_address = 0

    def allocate(self, size: int) -> Block:
        """A block for `size` bytes. Raises `OutOfDeviceMemory`."""
        size = max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)
        pool = self._pools[size <= SMALL_SIZE]
        block = pool.best_fit(size, self._tails[pool.small]) or self._from_driver(pool, size)
        self._split(block, size)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: Block) -> None:
        """Give a block back to its pool, merged with its free neighbours."""
        self.allocated -= block.size
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                block.pool.remove(neighbour)
                self._merge(block, neighbour)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give unused memory back to the driver: whole free segments, or the free end of an expandable one."""
        for pool in self._pools.values():
            for block in pool.whole_segments():
                if not self.expandable_segments:
                    pool.remove(block)
                    self.reserved -= block.size
        if self.expandable_segments:
            for small in self._tails:
                self._trim(small)

    def _from_driver(self, pool: _Pool, size: int) -> Block:
        if self.expandable_segments:
            return self._expand(pool, size)
        if pool.small:
            taken = SMALL_BUFFER
        elif size < MIN_LARGE_ALLOC:
            taken = LARGE_BUFFER
        else:
            taken = -(-size // ROUND_LARGE) * ROUND_LARGE
        self._take(taken, size)
        block = Block(self._next_address, taken, pool)
        self._next_address += taken
        return block

    def _expand(self, pool: _Pool, size: int) -> Block:
        """Map pages at the end of the pool's segment, extending a free block there."""
        page = SMALL_BUFFER if pool.small else LARGE_BUFFER
        tail = self._tails[pool.small]
        room = tail.size if tail is not None and tail.free else 0
        taken = -(-(size - room) // page) * page
        self._take(taken, size)
        tail = self._tails[pool.small]  # a retry may have trimmed it
        if tail is not None and tail.free:
            pool.remove(tail)
            missing = size - tail.size
            taken = max(taken, -(-missing // page) * page)
            tail.size += taken
            return tail
        address = (0 if pool.small else 1 << 60) if tail is None else tail.address + tail.size
        block = Block(address, taken, pool, before=tail)
        if tail is not None:
            tail.after = block
        self._tails[pool.small] = block
        return block

    def _take(self, taken: int, size: int) -> None:
        if self.limit is not None and self.reserved + taken > self.limit:
            self.retries += 1
            self.empty_cache()
            if self.reserved + taken > self.limit:
                raise OutOfDeviceMemory(size, self.reserved)
        self.reserved += taken
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _trim(self, small: bool) -> None:
        """Unmap the whole pages of a segment's free end."""
        tail = self._tails[small]
        if tail is None or not tail.free:
            return
        page = SMALL_BUFFER if small else LARGE_BUFFER
        pages = tail.size // page * page
        tail.pool.remove(tail)
        self.reserved -= pages
        tail.size -= pages
        if tail.size:
            tail.pool.add(tail)
            return
        self._tails[small] = tail.before
        if tail.before is not None:
            tail.before.after = None

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        splits_finely = block.pool.small or self.expandable_segments
        if not (rest >= MIN_BLOCK if splits_finely else rest > SMALL_SIZE):
            return
        remainder = Block(block.address + size, rest, block.pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = remainder
        elif self._tails[block.pool.small] is block:
            self._tails[block.pool.small] = remainder
        block.after = remainder
        block.size = size
        block.pool.add(remainder)

    def _merge(self, block: Block, neighbour: Block) -> None:
        """Let `block` absorb a free neighbour."""
        if self._tails[block.pool.small] is neighbour:
            self._tails[block.pool.small] = block
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
