"""How parameters, gradients and states are spread over devices."""

from __future__ import annotations

from autofit.lattice import Axis, Config
from autofit.techniques.job import Job
from autofit.techniques.technique import Technique


class Sharding(Technique):
    """`none` is one device. The others need several ranks and come with a later release."""

    axis = Axis(
        name="sharding",
        values=("zero3", "fsdp", "zero2", "zero1", "ddp", "none"),
        recipe="none",
    )

    later = frozenset({"zero3", "fsdp", "zero2", "zero1", "ddp"})

    def unsupported(self, config: Config, job: Job) -> str | None:
        if config["sharding"] in self.later:
            return f"sharding={config['sharding']} is not built yet: it comes with a later release; use sharding=none"
        if job.workload.devices > 1:
            return "training on several devices is not built yet: it comes with a later release; use --devices 1"
        return None
