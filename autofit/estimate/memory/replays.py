"""What the caching allocator reserves for a step: by replaying its timeline, or as a similar step showed."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

import numpy as np

from autofit.core.lattice import Config
from autofit.core.outcome import PHASES
from autofit.estimate.memory.allocator import OLDEST_FIRST, Block, CachingAllocator, OutOfDeviceMemory
from autofit.estimate.memory.memory_trace import EMPTIED
from autofit.estimate.memory.timeline import Timeline
from autofit.techniques import Part, affecting
from autofit.techniques.axes.kernels import by_liger

STEPS = 8
"""The fewest steps of a trial. What the allocator keeps may grow for a few steps, as blocks come to lie differently."""


def replay(
    line: Timeline,
    workspace: int,
    *,
    expandable_segments: bool = True,
    release: tuple[int, int] = OLDEST_FIRST,
    memory: int | None = None,
    limit: int | None = None,
    capped: bool = False,
    others: Sequence[Timeline] = (),
) -> CachingAllocator:
    """The caching allocator of torch's `release` after up to `STEPS` optimizer steps, with `limit` bytes from the
    driver, or `capped` by torch itself. `memory` is the device's; at least `limit` is assumed. Raises
    `OutOfDeviceMemory`.

    The timeline is followed by its second step again and again, each time after those of the `others`, on shorter
    sequences, until a step leaves the free blocks where they were.
    """
    allocator = CachingAllocator(
        expandable_segments=expandable_segments,
        capped=capped,
        release=release,
        memory=None if memory is None else max(memory, limit or 0),
    )
    blocks: dict[int, Block] = {}
    workspaces = _workspaces(line)

    def run(events: Iterable[Event], blocks: dict[int, Block], workspaces: Collection[int] = ()) -> None:
        for index, (storage, size, stream) in enumerate(events):
            if size > 0:
                blocks[storage] = allocator.allocate(size, stream)
            elif size < 0:
                allocator.release(blocks.pop(storage))
            elif stream == EMPTIED:
                allocator.empty_cache()
            if index in workspaces:
                allocator.allocate(workspace)

    every = _events(line)
    run(every[: line.setup], blocks, workspaces)
    allocator.set_up(limit)
    run(every[line.setup :], blocks, [index - line.setup for index in workspaces])
    renewed = line.renewed()
    # What replaces states belongs to one timeline alone.
    second_steps = [] if renewed else [_events(other)[other.second : other.evaluation] for other in others]
    free = allocator.free_blocks()
    for _ in range(STEPS - 2):
        for old, new in renewed:
            blocks[old] = blocks.pop(new)
        for step in second_steps:
            run(step, {})
        run(every[line.second : line.evaluation], blocks)
        before, free = free, allocator.free_blocks()
        if free == before:
            break
    return allocator


Event = tuple[int, int, int]
"""Storage, bytes, stream."""


def _events(line: Timeline) -> list[Event]:
    return list(zip(line.storages.tolist(), line.sizes.tolist(), line.streams.tolist(), strict=True))


def _workspaces(line: Timeline) -> set[int]:
    """The events after which cuBLAS takes a workspace: of the forward's thread before the first step, as a trial makes
    a product first (`trial.measure`), and of autograd's at its first product."""
    of_backward = line.of_products & (line.sizes > 0) & (line.phases == PHASES.index("backward"))
    return {max(line.setup - 1, 0), *np.flatnonzero(of_backward)[:1].tolist()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """What the allocator holds at most, in bytes."""

    allocated: int
    """With remainders of up to 1 MiB that are not split off where there are no expandable segments."""
    reserved: int
    gives_back_cache: bool
    """Whether unused memory has to be given back for `reserved` to be enough."""


class Replays:
    """The outcomes of replays. Some configs have one timeline, such as most that differ in the attention package."""

    def __init__(
        self, *, expandable_segments: bool, release: tuple[int, int] = OLDEST_FIRST, memory: int | None = None
    ) -> None:
        self._replay = partial(replay, expandable_segments=expandable_segments, release=release, memory=memory)
        self._reserved: dict[tuple[bytes, int, int | None, bool], Reserved] = {}

    def reserved(
        self,
        line: Timeline,
        workspace: int,
        limit: int | None,
        *,
        capped: bool = False,
        others: Sequence[Timeline] = (),
    ) -> Reserved:
        """What a step takes within `limit` bytes, or else within the least limit that is enough for it; `capped` and
        `others` as for `replay`."""
        content = sha256()
        for timeline in (line, *others):
            for part in (timeline.sizes, timeline.storages, timeline.phases, timeline.streams, timeline.of_products):
                content.update(part.tobytes())
        key = content.digest(), workspace, limit, capped
        if key not in self._reserved:
            self._reserved[key] = self._outcome(line, workspace, limit, capped, others)
        return self._reserved[key]

    def _outcome(
        self, line: Timeline, workspace: int, limit: int | None, capped: bool, others: Sequence[Timeline]
    ) -> Reserved:
        allocator = None
        while allocator is None:
            try:
                allocator = self._replay(line, workspace, limit=limit, capped=capped, others=others)
            except OutOfDeviceMemory as error:
                limit = error.needed
        return Reserved(
            allocated=allocator.peak_allocated,
            reserved=allocator.peak_reserved,
            gives_back_cache=allocator.retries > 0,
        )


def alike(config: Config) -> Hashable:
    """A key of configs whose steps leave about the same share of memory unused: of one decoder trace, one loss, and one
    range of micro-batches (1 and 2, 4 and 8, and so on; with Liger's kernels, which write gradients over what they have
    kept, each is its own). The optimizer and the rank matter little."""
    micro_batch = config.number("micro_batch")
    size = micro_batch if by_liger(config) else (micro_batch.bit_length() - 1) // 2
    return affecting(config, Part.DECODER, Part.RANK), config["loss"] == "full", size


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragmentation:
    """What may be taken for reserved without a replay: of what fits, a share more than is allocated, as a step `alike`
    showed; of what does not, what is allocated."""

    share: float | None
    """None where no step alike is known. Half are off by less than 0.005 and, but for Liger's kernels, 19 of 20 by less
    than 0.03 (test_whole_lattice.py)."""
    by_liger: bool = False
    """Whether these are steps with Liger's kernels."""

    @property
    def error(self) -> float:
        """By what share more may be needed: no config of test_whole_lattice.py exceeds it."""
        return 0.15 if self.by_liger else 0.1

    def borrowed(self, allocated: int, limit: int) -> int | None:
        """The bytes to take for reserved; None where only a replay can tell what fits."""
        if allocated > limit:
            return allocated
        reserved = None if self.share is None else int(allocated * (1.0 + self.share))
        return None if reserved is None or limit < reserved * (1.0 + self.error) else reserved
