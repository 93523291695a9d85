"""Sequences per forward; accumulation makes up the fixed global batch."""

from __future__ import annotations

from autofit.catalog.models import shape
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

    def holds(self, lighter: Config, heavier: Config, job: Job) -> bool:
        """Whether gradients do not upset the order.

        Where the micro-batch is the whole batch, gradients grow as activations are freed. Where there is accumulation,
        all of them are alive beside a micro-step's activations: with all weights trained that may be more. Adapters'
        gradients of each layer, fp32, are no more than the smallest thing that is kept of a larger batch, the layer's
        input in 16 bits, unless tokens are few.
        """
        whole = job.workload.batch_per_device
        if heavier.number("micro_batch") < whole:
            return True
        model = shape(job.model)
        if lighter["method"] == "full" or heavier["checkpointing"] == "offload" or model.experts or not model.layers:
            return False
        # A pair of adapter matrices has rank x (inputs + outputs) parameters. One of the two is the hidden size, so
        # n Linear layers with w weights in all have a sum of n x hidden_size + w / hidden_size; n is at most 8.
        per_layer = 8 * model.hidden_size + model.linear_parameters / model.layers / model.hidden_size
        gradients = 4 * lighter.number("rank") * per_layer
        tokens = (whole - lighter.number("micro_batch")) * job.workload.seq_len
        return gradients <= 2 * tokens * model.hidden_size

    def plan(self, config: Config, job: Job, plan: Plan) -> None:
        plan.micro_batch = config.number("micro_batch")
