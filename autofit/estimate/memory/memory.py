"""From the timeline of a step to what the device reports: what the allocator reserves, and what lies outside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autofit.core.outcome import SAVING
from autofit.estimate.memory import heap
from autofit.estimate.memory.replays import Fragmentation, Replays
from autofit.estimate.memory.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a step takes, in bytes."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    host_bytes: int
    breakdown: dict[str, int]
    """By what it holds at the moment of the peak; adds up to `device_bytes`."""
    phase_peaks: dict[str, int]
    gives_back_cache: bool = False
    borrowed_error: float = 0.0
    """Both as of `Footprint`."""


def cuda_memory(
    line: Timeline,
    workspace: int,
    *,
    limit: int,
    replays: Replays,
    capped: bool = False,
    fragmentation: Fragmentation | None = None,
    others: Sequence[Timeline] = (),
    context: int,
    saving: int = 0,
) -> Memory:
    """The memory of two optimizer steps within `limit` bytes of device memory, or else the least that is enough.

    `workspace` is cuBLAS's per handle, `context` lies outside of the allocator, and saving a checkpoint takes `saving`
    beyond what lies there between steps; all in bytes. Torch enforces a limit that is `capped`, as it is less than the
    device has. A given `fragmentation` may save a replay. `others` are timelines of the same step on shorter sequences.
    """
    limit -= context
    handles = 2 * workspace  # the forward's thread and autograd's
    parts = _parts(line)
    parts["temporaries"] += handles
    allocated = in_parts = sum(parts.values())
    borrowed_error, gives_back_cache = 0.0, False
    reserved = None if fragmentation is None else fragmentation.borrowed(allocated, limit)
    if fragmentation is not None and reserved is not None:
        borrowed_error = fragmentation.error
    else:
        held = replays.reserved(line, workspace, max(limit, allocated), capped=capped, others=others)
        allocated = max(allocated, held.allocated)
        reserved, gives_back_cache = max(held.reserved, allocated), held.gives_back_cache
    return Memory(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_bytes=reserved + context,
        host_bytes=0,
        breakdown={**parts, "fragmentation": reserved - in_parts, "context": context},
        phase_peaks={
            phase: size + handles
            for phase, size in {**line.phase_peaks(), SAVING: int(line.totals[-1]) + saving}.items()
        },
        gives_back_cache=gives_back_cache,
        borrowed_error=borrowed_error,
    )


def most_of(ranks: Sequence[Memory]) -> Memory:
    """That of the rank that takes most of its device, with each phase's peak at any."""
    phases = {phase: max(rank.phase_peaks[phase] for rank in ranks) for phase in ranks[0].phase_peaks}
    allocated = max(rank.peak_allocated_bytes for rank in ranks)
    most = max(ranks, key=lambda rank: rank.device_bytes)
    return replace(most, peak_allocated_bytes=allocated, phase_peaks=phases)


def host_memory(line: Timeline, traits: heap.Traits, *, hosted: int = 0) -> Memory:
    """The memory of two optimizer steps on a CPU: its heap, what is mapped, and what malloc keeps on top of both.
    `hosted` bytes are there throughout: a CPU gains nothing by moving them to its host."""
    totals = heap.resident(line) + heap.kept(line, traits) + hosted
    at = int(totals.argmax())
    peak, alive = int(totals[at]), int(line.totals[at]) + hosted
    parts = _parts(line, at)
    parts["optimizer"] += hosted
    return Memory(
        peak_allocated_bytes=peak,  # a trial on a CPU has one figure for all three
        peak_reserved_bytes=peak,
        device_bytes=peak,
        host_bytes=peak,
        breakdown={**parts, "fragmentation": peak - alive, "context": 0},
        phase_peaks={**line.by_phase(totals), SAVING: int(totals[-1])},
    )


def _parts(line: Timeline, at: int | None = None) -> dict[str, int]:
    return {category.name.lower(): size for category, size in line.breakdown(at).items()}
