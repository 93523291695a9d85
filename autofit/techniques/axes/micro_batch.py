"""Sequences per forward; gradient accumulation makes up the rest of the fixed global batch."""

from __future__ import annotations

from autofit.catalog.models import shape
from autofit.core.lattice import Axis, Config
from autofit.techniques.job import Job
from autofit.techniques.technique import Part, Technique


class MicroBatch(Technique):
    """A divisor of the device's share of the global batch; the gradient is the same for every choice."""

    axis = Axis(
        name="micro_batch",
        values=(),
        recipe=1,
        does="Sequences per forward pass. Gradients are accumulated up to --global-batch.",
        where="divisors of each device's share of the global batch",
    )
    parts = frozenset({Part.DECODER})
    scales = True

    def unsupported(self, config: Config, job: Job) -> str | None:
        size, batch = config.number("micro_batch"), job.workload.batch_per_device
        if batch % size:
            divisors = sorted((d for d in range(1, batch + 1) if batch % d == 0), key=lambda d: abs(d - size))[:2]
            return (
                f"micro_batch {size} does not divide the {batch} sequences of a step on one device (see "
                f"--global-batch): {' or '.join(map(str, sorted(divisors)))} does"
            )
        return None

    def holds(self, lighter: Config, heavier: Config, job: Job) -> bool:
        """Whether the order still holds once gradients are counted.

        Where the micro-batch is the whole batch, gradients grow as activations are freed. With accumulation, all
        gradients are alive alongside a micro-step's activations, which may be more if all weights are trained. With
        adapters, a layer's fp32 gradients are no larger than the least that a larger batch adds per layer, the layer's
        16-bit input, unless tokens are few.
        """
        batch = job.workload.batch_per_device
        if heavier.number("micro_batch") < batch:
            return True
        model = shape(job.model)
        if lighter["method"] == "full" or heavier["checkpointing"] == "offload" or model.experts or not model.layers:
            return False
        # A pair of adapter matrices has rank x (inputs + outputs) parameters. One of the two is the hidden size, so
        # inputs + outputs of n Linear layers with w weights in all sum to n x hidden_size + w / hidden_size; n <= 8.
        per_layer = 8 * model.hidden_size + model.linear_parameters / model.layers / model.hidden_size
        gradients = 4 * lighter.number("rank") * per_layer
        tokens = (batch - lighter.number("micro_batch")) * job.workload.seq_len
        return gradients <= 2 * tokens * model.hidden_size
