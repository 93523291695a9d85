"""What a config is judged and built for: a model's architecture, the workload, and the machine that runs it."""

from __future__ import annotations

from dataclasses import dataclass

from autofit.catalog.models import Model
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.document import Document
from autofit.core.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Document):
    """Everything about a training run except its config."""

    model: Model
    workload: Workload
    hardware: Hardware
    stack: Stack
    expandable_segments: bool | None = None
    """Whether CUDA's allocator gets the expandable segments that every trial asks for; None where that is not known,
    and an estimate takes it that it does."""
    context_bytes: int | None = None
    """What a process takes of a CUDA device outside torch's allocator; None where nothing has shown it."""


def ranks_per_host(job: Job) -> int:
    """Ranks that are taken to share one host's memory and disk: all, or as many as the detected host has devices."""
    hardware, ranks = job.hardware, job.workload.devices
    return max(1, hardware.count) if hardware.spans_machines(ranks) else ranks
