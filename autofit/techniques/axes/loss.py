"""How the cross-entropy over the vocabulary is computed."""

from __future__ import annotations

from autofit.catalog.models import shape
from autofit.core.lattice import Axis, Config, chain
from autofit.techniques.axes.compilation import why_not_compiled
from autofit.techniques.axes.precision import is_mixed, product_format
from autofit.techniques.habits import replaces_loss
from autofit.techniques.job import Job
from autofit.techniques.losses.chunks import chunks_save
from autofit.techniques.technique import BuildPlan, Part, Technique


def chunks_are_one(config: Config, job: Job) -> bool:
    """Whether loss=chunked is sure to hold all logits of a micro-batch at once, which makes it the same as loss=full.

    In mixed precision hidden states are counted at 16 bits: where they are wider, this may be the case without being
    detected here.
    """
    if replaces_loss(job):
        return False
    counts = shape(job.model)
    tokens = int(config["micro_batch"]) * job.workload.seq_len
    head_bytes = counts.hidden_size * counts.vocabulary_size * (2 if config["precision"] == "bf16" else 4)
    hidden_bytes = counts.hidden_size * tokens * (4 if product_format(config) == "fp32" else 2)
    early_bytes = hidden_bytes + (head_bytes if config["method"] == "full" else 0)
    return not chunks_save(tokens, counts.hidden_size, counts.vocabulary_size, early_bytes)


class Loss(Technique):
    """`chunked` takes all logits at once, too, where chunks would need more memory."""

    axis = Axis(
        name="loss",
        values=("fused", "chunked", "full"),
        recipe="full",
        lighter=chain("fused", "chunked", "full"),
        does="How the cross-entropy over the vocabulary is computed.",
        meanings={
            "fused": "Liger's kernel, without logits in memory; GPUs, needs liger-kernel and a C compiler",
            "chunked": "the logits of a few rows at a time",
            "full": "all logits at once, as in transformers",
        },
    )
    parts = frozenset({Part.LOSS, Part.EVALUATION})

    def unsupported(self, config: Config, job: Job) -> str | None:
        trains_bias = config["loss"] == "full" or replaces_loss(job)
        if not trains_bias and config["method"] == "full" and shape(job.model).head_bias:
            return (
                f"loss={config['loss']} does not train the bias that the output head of {job.model.name} has: use full"
            )
        if config["loss"] != "fused":
            return None
        if job.hardware.kind not in ("cuda", "xpu"):
            return "loss=fused needs an accelerator that Triton compiles for; chunked does the same on the CPU"
        if job.stack.liger_kernel is None:
            return "loss=fused needs the liger-kernel package, which is not installed here"
        return why_not_compiled("loss=fused", job.hardware)

    def holds(self, lighter: Config, heavier: Config, job: Job) -> bool:
        """Always with adapters. Otherwise the head's gradient exists before the backward pass: `chunked` weighs it
        against the logits, but ignores the 16-bit copies of all weights that autocast holds until then; `fused` weighs
        neither."""
        if lighter["method"] != "full":
            return True
        return lighter["loss"] == "chunked" and not is_mixed(lighter)

    def plan(self, plan: BuildPlan) -> None:
        from autofit.techniques.losses import cross_entropy

        plan.loss = cross_entropy.KERNELS[plan.config.text("loss")]
