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
from autofit.estimate.memory.timeline import Timeline
from autofit.techniques import Part, affecting
from autofit.techniques.axes.kernels import by_liger

STEPS = 8
"""The fewest steps of a trial. What the allocator keeps may grow for a few steps, as blocks come to lie differently."""
SETTLED = 2
"""After so many steps that reserved nothing more, none is taken to: of 80 recorded configs one grew later, by 0.1 %."""


def replay(
    line: Timeline,
    workspace: int,
    *,
    expandable_segments: bool = True,
    release: tuple[int, int] = OLDEST_FIRST,
    limit: int | None = None,
    capped: bool = False,
    others: Sequence[Timeline] = (),
) -> CachingAllocator:
    """The caching allocator of torch's `release` after up to `STEPS` optimizer steps, with `limit` bytes from the
    driver, or `capped` by torch itself. Raises `OutOfDeviceMemory`.

    The timeline is followed by its second step again and again, each time after those of the `others`, on shorter
    sequences, until a step leaves the free blocks where they were.
    """
    allocator = CachingAllocator(expandable_segments=expandable_segments, capped=capped, release=release)
    blocks: dict[int, Block] = {}
    workspaces = _workspaces(line)

    def run(events: Iterable[Event], blocks: dict[int, Block], workspaces: Collection[int] = ()) -> None:
        for index, (storage, size, stream) in enumerate(events):
            if size > 0:
                blocks[storage] = allocator.allocate(size, stream)
            elif size < 0:
                allocator.release(blocks.pop(storage))
            if index in workspaces:
                allocator.allocate(workspace)

    every = _events(line)
    run(every[: line.setup], blocks, workspaces)
    allocator.set_up(limit)
    run(every[line.setup :], blocks, [index - line.setup for index in workspaces])
    renewed = line.renewed()
    # What replaces states belongs to one timeline alone.
    second_steps = [] if renewed else [_events(other)[other.second : other.evaluation] for other in others]
    free, unchanged = allocator.free_blocks(), 0
    for _ in range(STEPS - 2):
        for old, new in renewed:
            blocks[old] = blocks.pop(new)
        reserved = allocator.peak_reserved
        for step in second_steps:
            run(step, {})
        run(every[line.second : line.evaluation], blocks)
        unchanged = unchanged + 1 if allocator.peak_reserved == reserved else 0
        before, free = free, allocator.free_blocks()
        if unchanged == SETTLED or free == before:
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
    """Whether unused memory has to be given back for `reserved` to be within the limit."""


class Replays:
    """The outcomes of replays. Some configs have one timeline, such as most that differ in the attention package."""

    def __init__(self, *, expandable_segments: bool, release: tuple[int, int] = OLDEST_FIRST) -> None:
        self._replay = partial(replay, expandable_segments=expandable_segments, release=release)
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
        """What a step takes within `limit` bytes, or would take beyond; `capped` and `others` as for `replay`."""
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
        rerun = partial(self._replay, line, workspace, others=others)
        try:
            allocator = rerun(limit=limit, capped=capped)
        except OutOfDeviceMemory as error:
            allocator = rerun()
            allocator.peak_reserved = max(allocator.peak_reserved, error.needed)
        return Reserved(
            allocated=allocator.peak_allocated,
            reserved=allocator.peak_reserved,
            gives_back_cache=allocator.retries > 0,
        )


def fragmentation_keys(config: Config) -> tuple[Hashable, Hashable]:
    """Two cache keys: one per decoder trace, and a finer one that adds the micro-batch range (1 and 2, 4 and 8, and so
    on; with Liger's kernels, which write gradients over what they have kept, each is its own).

    Fragmentation depends little on the optimizer and the rank, and much on whether the logits are one block.
    """
    decoder = affecting(config, Part.DECODER, Part.RANK), config["loss"] == "full"
    micro_batch = config.number("micro_batch")
    return decoder, (decoder, micro_batch if by_liger(config) else (micro_batch.bit_length() - 1) // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragmentation:
    """The share of allocated memory that the allocator reserved on top of it for other steps."""

    of_alike: float | None = None
    """The share of a similar step: half are off by less than 0.005 and, but for Liger's kernels, 19 of 20 by less than
    0.03 (test_whole_lattice.py)."""
    of_decoder: float | None = None
    """The share of any step with the same decoder, which is enough where the step does not fit anyway."""
    by_liger: bool = False
    """Whether these are steps with Liger's kernels."""

    def borrowed(self, allocated: int, limit: int) -> tuple[int, float] | None:
        """Bytes to take as reserved, and by what share they may be too low; None where only a replay can tell."""
        share, error = self.of_alike, LIGER_ERROR if self.by_liger else ALIKE_ERROR
        if allocated > limit and share is None:
            share, error = self.of_decoder, DECODER_ERROR
        if share is None:
            return None
        reserved = int(allocated * (1.0 + share))
        return None if allocated <= limit < reserved * (1.0 + error) else (reserved, error)


ALIKE_ERROR, LIGER_ERROR, DECODER_ERROR = 0.1, 0.15, 0.2
"""By what share each may be too low, the second with Liger's kernels: no config of test_whole_lattice.py exceeds
them."""
