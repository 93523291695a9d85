"""What a config would take and give, predicted from its own training step, without a device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autofit.estimate.allocator import MIN_BLOCK, CachingAllocator
from autofit.estimate.cuda_kernels import cublas_workspace_bytes, cuda_scratch
from autofit.estimate.estimate import Estimate
from autofit.estimate.pattern import representatives
from autofit.estimate.recorder import Scratch
from autofit.estimate.speed import Rates, features, seconds
from autofit.estimate.splice import NotUniform, splice
from autofit.estimate.tape import Category, Place, Tape
from autofit.estimate.timeline import Timeline, timeline
from autofit.estimate.trace import layer_kinds, trace_micro_steps
from autofit.estimate.update import trace_updates
from autofit.estimate.work import Work
from autofit.lattice import Config
from autofit.techniques import Job
from autofit.training.flops import mfu

HOST_ALIGNMENT = 64
"""Bytes to which PyTorch aligns host memory (c10/core/alignment.h)."""
CONTEXT_BYTES = 400 * 1024**2
"""What a CUDA context and its loaded kernels take outside of the allocator. Not measured yet: reports speak of 300 MB
and more, growing with the kernels that are used."""


@dataclass(frozen=True, slots=True)
class Traced:
    """What a config's step does on a kind of device, before any rate is applied."""

    timeline: Timeline
    work: tuple[tuple[Work, int], ...]
    """Of one optimizer step of the whole global batch: each operation with how often it runs."""


def trace(config: Config, job: Job, *, exact: bool = False) -> Traced:
    """Trace the training step of `config` for `job`. `exact` runs every decoder layer instead of repeating a few."""
    scratch = cuda_scratch if job.hardware.kind == "cuda" else _no_scratch
    accumulation = job.workload.batch_per_device // config.number("micro_batch")
    micro_steps, counts = _micro_steps(config, job, min(accumulation, 2), scratch, exact=exact)
    updates = trace_updates(config, job, scratch)
    rounding = MIN_BLOCK if _cuda(job) else HOST_ALIGNMENT
    return Traced(timeline(micro_steps, updates, rounding), tuple(_work(micro_steps, counts, updates, accumulation)))


def estimate(
    config: Config, job: Job, *, memory_limit_bytes: int, rates: Rates | None, exact: bool = False
) -> Estimate:
    """Predict memory and time of `config`, which must be supported; `rates` of None leaves the time out."""
    started = time.monotonic()
    traced = trace(config, job, exact=exact)
    memory = _memory(traced.timeline, job)
    step_seconds = None if rates is None else seconds(features(traced.work, rates), rates, overlapping_host=_cuda(job))
    speed = None if step_seconds is None else job.workload.tokens_per_step / step_seconds
    return Estimate(
        config=config,
        hardware=job.hardware.name,
        memory_limit_bytes=memory_limit_bytes,
        **memory,
        step_seconds=step_seconds,
        tokens_per_second=speed,
        mfu=None if speed is None else mfu(job, config, speed),
        calibrated_on=0 if rates is None else rates.calibrated_on,
        relative_error=None if rates is None else rates.relative_error,
        seconds_to_estimate=time.monotonic() - started,
    )


def _micro_steps(config: Config, job: Job, count: int, scratch: Scratch, *, exact: bool) -> tuple[Tape, dict[int, int]]:
    """The tape of the full stack, and for how many layers each traced layer stands."""
    kinds = layer_kinds(config, job)
    every = tuple(range(len(kinds)))
    if not exact:
        layers, representative = representatives(kinds)
        small = trace_micro_steps(config, job, layers, count, scratch)
        try:
            spliced = splice(small, representative)
        except NotUniform:
            pass  # layers of one kind differ after all: every one of them is run
        else:
            spliced.work = small.work
            return spliced, {place: representative.count(place) for place in range(len(layers))}
    return trace_micro_steps(config, job, every, count, scratch), dict.fromkeys(every, 1)


def _work(tape: Tape, counts: dict[int, int], updates: Tape, accumulation: int) -> Iterator[tuple[Work, int]]:
    """Operations of one optimizer step: the first micro-step once, the second for all further ones, the update."""
    for place, works in tape.work.items():
        repeats = accumulation - 1 if place.stage.endswith("-2") else 1
        for work in works:
            yield work, counts.get(place.layer, 1) * repeats
    for place, works in updates.work.items():
        if place.stage == "optimizer-2":
            for work in works:
                yield work, 1


def _memory(line: Timeline, job: Job) -> dict[str, Any]:
    if not _cuda(job):
        peak = line.peak()
        parts = {category.name.lower(): size for category, size in line.breakdown().items()}
        return {
            "peak_allocated_bytes": peak,
            "peak_reserved_bytes": peak,
            "device_bytes": peak,
            "host_bytes": peak,
            "breakdown": {**parts, "fragmentation": 0, "context": 0},
            "phase_peaks": line.phase_peaks(),
        }
    workspace = cublas_workspace_bytes(job.hardware.capability)
    allocator = replay(line, workspace)
    handles = 2 * workspace  # the forward's thread and autograd's
    parts = {category.name.lower(): size for category, size in line.breakdown().items()}
    parts["temporaries"] += handles
    allocated = sum(parts.values())
    reserved = max(allocator.peak_reserved, allocated)
    return {
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": reserved,
        "device_bytes": reserved + CONTEXT_BYTES,
        "host_bytes": 0,
        "breakdown": {**parts, "fragmentation": reserved - allocated, "context": CONTEXT_BYTES},
        "phase_peaks": {phase: size + handles for phase, size in line.phase_peaks().items()},
    }


def replay(line: Timeline, workspace: int, *, expandable_segments: bool = True) -> CachingAllocator:
    """The allocator after the whole timeline; cuBLAS takes a workspace at the first product of each thread."""
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    blocks: dict[int, Any] = {}
    waiting = {"forward", "backward"}
    weights = int(Category.WEIGHTS)
    for place, storage, size, category in zip(
        line.places, line.storages.tolist(), line.sizes.tolist(), line.categories.tolist(), strict=True
    ):
        if waiting and category != weights and _starts(place, waiting):
            allocator.allocate(workspace)
        if size > 0:
            blocks[storage] = allocator.allocate(size)
        else:
            allocator.release(blocks.pop(storage))
    return allocator


def _starts(place: Place, waiting: set[str]) -> bool:
    """Whether a thread makes its first product here; it waits no longer then."""
    if place.phase not in waiting:
        return False
    waiting.remove(place.phase)
    return True


def _cuda(job: Job) -> bool:
    return job.hardware.kind == "cuda"


def _no_scratch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    return 0
