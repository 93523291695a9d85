"""What a config's step takes, as an estimator finds it and a store keeps it: without rates, hosts and trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from autofit.core.document import Document, read
from autofit.core.lattice import Config
from autofit.core.prediction import StepWork
from autofit.techniques.axes.optimizer import kind_of

MEMORY_ERROR = 0.5
"""Assumed relative error of memory by formula (`bound`). The formula was made for GPT-2's layers; a test checks it
against traces of others, with and without a fused attention, and with experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint(Document):
    """The memory and the work of one config's step on one kind of hardware."""

    config: Config
    hardware: str
    memory_limit_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    """What the driver would show: reserved memory and the context. Where that is beyond the limit, the least limit that
    would be enough."""
    host_bytes: int
    """Host memory that one rank's training takes, without what its process holds before it trains: Python, the
    libraries and the context's part on the host (`Measurement.host_baseline_bytes`)."""
    breakdown: dict[str, int] = field(hash=False)
    """Bytes by what they hold at the moment of the peak; they add up to `device_bytes`."""
    phase_peaks: dict[str, int] = field(hash=False)
    seconds_to_estimate: float
    work: StepWork | None = None
    """What the time is computed from; None where the step was not traced, or nothing is known of the hardware."""
    gives_back_cache: bool = False
    """Whether `device_bytes` is enough only because CUDA's allocator gives unused memory back before it fails: it then
    holds for this limit alone, and steps are slower than predicted."""
    borrowed_error: float = 0.0
    """By what share `device_bytes` may be too low, as its fragmentation is that of another config of the lattice, or is
    left out where it does not fit anyway; 0 where the allocator was replayed for this one."""
    uncompiled: bool = False
    """Whether a config that compiles is predicted as without, because its compiled layers cannot be traced."""
    untraced: str | None = None
    """Why its memory is by formula; None for a trace."""

    @property
    def memory_error(self) -> float:
        """Relative error of memory by formula, for which the limit must leave room; 0 for a trace."""
        return 0.0 if self.untraced is None else MEMORY_ERROR

    @property
    def fits_device(self) -> bool:
        """Whether it stays within the limit even if its memory is off by `memory_error`."""
        return self.device_bytes * (1.0 + self.memory_error) <= self.memory_limit_bytes

    @property
    def peak_phase(self) -> str:
        """The phase in which most is allocated, of `phase_peaks`."""
        return max(self.phase_peaks, key=lambda phase: self.phase_peaks[phase])

    @property
    def headroom_bytes(self) -> int:
        """What the limit leaves free; negative where it is exceeded."""
        return self.memory_limit_bytes - self.device_bytes

    def under(self, memory_limit_bytes: int, context_bytes: int | None = None) -> Footprint | None:
        """The same under another limit and with another CUDA context, if that is given. None if it must be recomputed:
        these decide what CUDA's allocator keeps or pages out, or borrowed fragmentation decides what fits."""
        more = 0 if context_bytes is None else context_bytes - self.breakdown["context"]
        if memory_limit_bytes == self.memory_limit_bytes and not more:
            return self
        if kind_of(self.config).paged:
            return None
        device = self.device_bytes + more
        on_card = self.breakdown["context"] > 0
        exceeded = memory_limit_bytes < device - self.breakdown["fragmentation"]
        ample = self.fits_device and memory_limit_bytes >= device * (1.0 + self.borrowed_error)
        if on_card and not exceeded and (self.gives_back_cache or not ample):
            return None
        parts = {**self.breakdown, "context": self.breakdown["context"] + more}
        return replace(self, memory_limit_bytes=memory_limit_bytes, device_bytes=device, breakdown=parts)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Footprint:
        """The inverse of `to_json`; other keys are ignored, such as those of estimates that were stored whole. Raises
        `ValueError` for work as an earlier version counted it."""
        names = {f.name for f in fields(Footprint)}
        footprint = read(Footprint, {name: value for name, value in data.items() if name in names})
        if footprint.work is None and data["work"] is not None:
            raise ValueError("its work was counted by an earlier version")
        return footprint
