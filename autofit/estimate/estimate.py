"""A prediction as a value: what a config would take and give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autofit.lattice import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The predicted memory and time of one config on one kind of hardware."""

    config: Config
    hardware: str
    memory_limit_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    """What the driver would show: reserved memory and the context."""
    host_bytes: int
    breakdown: dict[str, int] = field(hash=False)
    """Bytes by what they hold at the moment of the peak; they add up to `device_bytes`."""
    phase_peaks: dict[str, int] = field(hash=False)
    step_seconds: float | None
    """Of one optimizer step of the whole global batch; None where the hardware's speed is not known."""
    tokens_per_second: float | None
    mfu: float | None
    calibrated_on: int
    """Measured trials that the time was fitted to; 0 for a guess from data sheets."""
    relative_error: float | None
    """Of the predicted time."""
    seconds_to_estimate: float

    @property
    def fits(self) -> bool:
        """Whether the limit holds it."""
        return self.device_bytes <= self.memory_limit_bytes

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "config": self.config.to_json(),
            "hardware": self.hardware,
            "fits": self.fits,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "memory_limit_bytes": self.memory_limit_bytes,
            "breakdown": dict(self.breakdown),
            "phase_peaks": dict(self.phase_peaks),
            "tokens_per_second": self.tokens_per_second,
            "step_seconds": self.step_seconds,
            "mfu": self.mfu,
            "calibrated_on": self.calibrated_on,
            "relative_error": self.relative_error,
            "seconds_to_estimate": self.seconds_to_estimate,
        }
