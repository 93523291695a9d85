"""Sequences per forward; accumulation makes up the fixed global batch."""

from __future__ import annotations

from autofit.lattice import Axis, Config
from autofit.techniques.job import Job
from autofit.techniques.technique import Plan, Technique


class MicroBatch(Technique):
    """A divisor of the device's share of the global batch; the gradient is the same whichever is taken."""

    axis = Axis(name="micro_batch", values=(), recipe=1)

    def unsupported(self, config: Config, job: Job) -> str | None:
        size, batch = config.number("micro_batch"), job.workload.batch_per_device
        if batch % size:
            return f"micro_batch {size} does not divide the {batch} sequences of a step on one device"
        return None

    def plan(self, config: Config, job: Job, plan: Plan) -> None:
        plan.micro_batch = config.number("micro_batch")
