"""What is predicted for a config before its trial runs: its memory, its time, and the work that its step does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from autofit.core.document import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """A device's work for one optimizer step of the whole global batch, from which the device's rates give its time.

    On an accelerator each operation counts either its arithmetic or its bytes, whichever takes longer according to the
    data sheet; on a processor, both.
    """

    amounts: Mapping[str, float] = field(hash=False)
    """How much of each kind (`core.device.work_kinds.KINDS`, which has their units); absent ones are 0."""
    estimator: int
    """Version of the estimator that counted the work; counts of different versions cannot be compared."""
    update: Mapping[str, float] = field(default_factory=dict, hash=False)
    """The part of it that the optimizer's update does."""
    waits: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Bytes of transfers and of updates on the host that the device waits for, by kind
    (`core.device.work_kinds.TRANSFERS`)."""
    beside: Mapping[str, float] = field(default_factory=dict, hash=False)
    """The same of transfers that overlap with the arithmetic."""

    def times(self, ranks: int) -> StepWork:
        """The same work done `ranks` times by one processor; what the ranks wait for, they wait for together."""
        return replace(
            self,
            amounts={kind: ranks * amount for kind, amount in self.amounts.items()},
            update={kind: ranks * amount for kind, amount in self.update.items()},
        )

    @classmethod
    def mean(cls, weighted: Sequence[tuple[float, StepWork]]) -> StepWork:
        """The weighted sum of these steps' work. Negative weights, as of an interpolation, make no amount negative."""
        kinds = ("amounts", "update", "waits", "beside")
        sums: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
        for weight, work in weighted:
            for kind in kinds:
                for name, amount in getattr(work, kind).items():
                    sums[kind][name] = sums[kind].get(name, 0.0) + weight * amount
        positive = {kind: {name: max(amount, 0.0) for name, amount in sums[kind].items()} for kind in kinds}
        return cls(estimator=weighted[0][1].estimator, **positive)

    def without(self, part: StepWork, times: float = 1.0) -> StepWork:
        """The computing that remains when `times` that of `part` is taken away."""
        taken = {kind: times * amount for kind, amount in part.amounts.items()}
        rest = {kind: max(amount - taken.get(kind, 0.0), 0.0) for kind, amount in self.amounts.items()}
        return StepWork(amounts=rest, estimator=self.estimator)

    @property
    def of_update(self) -> StepWork:
        return StepWork(amounts=self.update, estimator=self.estimator)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> StepWork | None:
        """The inverse of `to_json`; None for work that an earlier version counted in another way."""
        if data is None or "amounts" not in data or data.keys() - {f.name for f in fields(cls)}:
            return None
        return cls(**data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Document):
    """What was predicted for a config before its trial ran, to be compared with its measurement."""

    peak_allocated_bytes: int
    device_bytes: int
    """What the driver would report."""
    step_seconds: float | None
    """Seconds of one optimizer step of the whole global batch; None where the hardware's speed was not known."""
    calibrated_on: int
    """Number of measured trials that the time was fitted to; 0 for a guess."""
    relative_error: float | None
    """Expected relative error of the predicted time."""
    work: StepWork | None = None
    """What the time was predicted from; None where it was not known, and for trials stored before it was recorded."""
    memory_error: float = 0.0
    """Relative error of the memory, for which a limit must leave room: above 0 where a formula stood in for a trace."""
    peak_reserved_bytes: int | None = None
    """What the allocator would take from the driver; None for trials stored before it was recorded."""
    micro_step_seconds: float | None = None
    """Seconds of one micro-step: what these leave of `step_seconds` is the update. None where it is not known."""

    def fits(self, memory_limit_bytes: int) -> bool:
        """Whether the config was predicted to fit within the limit."""
        return self.device_bytes * self.memory_error <= memory_limit_bytes - self.device_bytes  # exact without an error
