"""What DeepSpeed's ZeRO takes of the host and moves between devices, and which parts of its flat buffers each rank has.

Taken from deepspeed 0.19.8, as zero.py and zero_third.py, which put these into a trace.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autofit.estimate.sharding.library import Holdings, Hosted, Library, Traffic, passes
from autofit.techniques.deepspeed_settings import SUB_GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The buffer sizes that DeepSpeed is configured with, in elements."""

    reduce: int
    """`reduce_bucket_size`."""
    live: int = 0
    """`stage3_max_live_parameters`: so many are gathered, and no more are prefetched."""
    persists: int = 0
    """`stage3_param_persistence_threshold`: parameters no larger than this are kept whole on every rank."""
    overlaps: bool = False
    """`overlap_comm`: stages 1 and 2 then have two buckets."""
    group: int = 0
    """`sub_group_size` of stage 3: a group with fewer elements takes the next parameter, too."""
    parameter: int = 0
    """`buffer_size` of parameters in files: no parameter is larger."""
    parameters: int = 0
    """`buffer_count` of parameters in files."""
    states: int = 0
    """`buffer_count` of states in files; each buffer is as large as the largest group."""
    in_memory: int = 0
    """`max_in_cpu`: this many of the trained parameters are in host memory, too."""

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Buckets:
        """From DeepSpeed's JSON."""
        zero = settings["zero_optimization"]
        files, states = zero.get("offload_param", {}), zero.get("offload_optimizer", {})
        return cls(
            reduce=zero["reduce_bucket_size"],
            live=zero.get("stage3_max_live_parameters", 0),
            persists=zero.get("stage3_param_persistence_threshold", 0),
            overlaps=zero["overlap_comm"],
            group=zero.get("sub_group_size", SUB_GROUP),
            parameter=files.get("buffer_size", 0),
            parameters=files.get("buffer_count", 0),
            states=states.get("buffer_count", 0),
            in_memory=files.get("max_in_cpu", 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroAmounts(Library):
    """Any stage of ZeRO, in bytes."""

    stage: int
    wide: bool
    """Whether weights are fp32."""
    bf16: bool
    """Whether 16 bits are bf16, for whose stage 1 DeepSpeed has an optimizer of its own."""
    pinned: bool
    """Whether the device is a GPU, beside which host buffers are page-locked: PyTorch's allocator rounds them up to the
    next power of two (aten/src/ATen/core/CachingHostAllocator.h)."""
    buckets: Buckets
    rank: int
    """The adapters' rank."""
    interval: int
    """Every how many layers the backward recomputes one, beginning with the first; 0 for none."""

    @property
    def flat(self) -> float:
        return SUB_GROUP * self.ranks if self.stage == 3 else math.inf

    @property
    def keeps_inputs(self) -> bool:
        """A frozen layer's own backward would keep its gathered weight alive: stage 3 has another for all layers
        (`zero3_linear_wrap`), which finds weights through their parameters, and keeps every input."""
        return self.stage == 3

    def hosted(self, holdings: Holdings, *, accumulates: bool) -> Hosted:
        """A rank's masters, states and gradients, the 16-bit copy on its way to the device, and the gradient sums."""
        if self.offload == "none":
            return Hosted()
        trained = holdings.trained_bytes / self.ranks
        masters, states = self._block(self.masters * trained), holdings.states_bytes / self.ranks
        if self.offload == "nvme":
            return self._kept_beside_files(trained, holdings.sizes)
        kept: list[float] = []
        passing: list[float] = []
        sums: list[float] = []
        if self.stage == 3:
            sums = [self.masters * trained]  # of the micro-batches so far (grad_partitions_flat_buffer)
            if self.offload != "optimizer":
                kept = [trained, holdings.frozen_bytes / self.ranks]
        else:
            # param_buffer_of_bit16_for_cpu_offload_groups, temp_grad_buffer_for_cpu_offload
            passing = [trained, max(holdings.sizes, default=0)]
            if self.stage == 2 and accumulates and (self.mixed or self.wide):
                # The gradients of the micro-batches so far, each whole (accumulated_grads_in_cpu). Pure bf16 sums them
                # in the masters' own gradients, and stage 1 on the device.
                sums = [float(size) for size in self.reached(holdings.sizes)]
        return Hosted(
            parameters=sum(map(self._block, kept)),
            gradients=masters + sum(map(self._block, sums)),
            optimizer=masters + states,
            passing=sum(map(self._block, passing)),
        )

    def _kept_beside_files(self, trained: float, sizes: Sequence[int]) -> Hosted:
        """What stays in host memory, `trained` being a rank's share of the trained parameters in bytes: gradients while
        they are summed, some parameters, and the buffers through which parameters and states go to the files and back
        (`new_cpu_locked_tensor` of csrc/aio). Frozen parameters are in files only."""
        buffers = self.buckets.parameters * self.buckets.parameter * self.width
        return Hosted(
            parameters=self._block(min(trained, self.buckets.in_memory * self.width)),
            gradients=self._block(self.masters * trained),
            passing=buffers + self.buckets.states * self.masters * self.largest_group(sizes),
        )

    def largest_group(self, sizes: Sequence[int]) -> float:
        """Bytes of a rank's largest group of trained parameters with these `sizes`, in order: one is closed once it has
        enough elements (`_create_fp16_sub_groups` of runtime/zero/stage3.py)."""
        groups = [0.0]
        for size in sizes:
            if groups[-1] >= self.buckets.group * self.width:
                groups.append(0.0)
            groups[-1] += size / self.ranks
        return max(groups)

    def traffic(self, holdings: Holdings, micro_steps: int) -> Traffic:
        away = (self.ranks - 1) / self.ranks
        trained, everything = holdings.trained_bytes, holdings.trained_bytes + holdings.frozen_bytes
        reductions = 1 if self.stage == 1 else micro_steps
        if self.stage == 3:
            linked = micro_steps * away * (2 * everything + trained)
        else:
            linked = away * trained * (2 * reductions + 1)  # all-reduced, although each rank keeps only its own part
        hosted = disk_read = disk_written = 0.0
        if self.offload != "none":
            hosted = (self._sums_moved(micro_steps) + self.masters + 1.0) * trained / self.ranks
        if self.offload in ("params", "nvme"):
            hosted += 2.0 * micro_steps * everything / self.ranks
        if self.offload == "nvme":
            swapped = (self.masters * trained + holdings.states_bytes) / self.ranks
            disk_read = swapped + 2.0 * micro_steps * everything / self.ranks
            disk_written = swapped + trained / self.ranks
        return Traffic(
            linked=linked,
            overlapped=self.buckets.overlaps,
            hosted=hosted,
            disk_read=disk_read,
            disk_written=disk_written,
            updated_on_host=0.0 if self.updaters else passes(holdings, self.ranks),
        )

    def _sums_moved(self, micro_steps: int) -> float:
        """How often the bytes of a trained weight go to the host or back while micro-batches are summed there: out at
        each one, and back in for the next."""
        if self.stage == 3:
            return self.masters * (2.0 * micro_steps - 1.0)
        return 2.0 * micro_steps - 1.0 if micro_steps > 1 else 0.0

    @property
    def width(self) -> int:
        """Bytes per element of a weight on the device."""
        return 4 if self.wide else 2

    def _block(self, size: float) -> float:
        return 2.0 ** math.ceil(math.log2(size)) if self.pinned and size > 0 else size

    def reached(self, sizes: Sequence[int]) -> list[int]:
        """The sizes of the parameters that overlap a rank's part of the flat buffer, at the rank where their sum is
        largest; `sizes` are those of all parameters, in order."""
        return max(([sizes[index] for index in part] for part in self.parts(sizes)), key=sum)

    def parts(self, sizes: Sequence[int]) -> list[dict[int, int]]:
        """For each rank, which of the parameters with these sizes, in order, overlap its part of the flat buffer, and
        by how many bytes."""
        ends = list(itertools.accumulate(sizes))
        share = sum(sizes) / self.ranks
        parts: list[dict[int, int]] = []
        for begin, stop in ((rank * share, (rank + 1) * share) for rank in range(self.ranks)):
            overlaps = (min(end, stop) - max(end - size, begin) for end, size in zip(ends, sizes, strict=True))
            parts.append({index: int(overlap) for index, overlap in enumerate(overlaps) if overlap > 0})
        return parts
