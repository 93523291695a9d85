"""The attention kernel."""

from __future__ import annotations

from autofit.catalog.models import shape
from autofit.core.device.hardware import compute_capability
from autofit.core.lattice import Axis, Config
from autofit.techniques.job import Job
from autofit.techniques.technique import BuildPlan, Technique

IMPLEMENTATIONS = {"sdpa": "sdpa", "flash": "flash_attention_2", "eager": "eager"}
"""transformers' names for them."""


class Attention(Technique):
    """`sdpa`: torch's choice of fused kernel. `flash`: the flash-attn package. `eager`: scores materialised."""

    axis = Axis(
        name="attention",
        values=("sdpa", "flash", "eager"),
        recipe="sdpa",
        lighter=frozenset({("sdpa", "eager"), ("flash", "eager")}),
        does="The attention kernel.",
        meanings={
            "sdpa": "torch's choice of fused kernel; most models",
            "flash": "the flash-attn package; NVIDIA GPUs from Ampere on and AMD's, in 16 bits",
            "eager": "all scores in memory",
        },
    )

    def unsupported(self, config: Config, job: Job) -> str | None:
        if config["attention"] == "sdpa" and not shape(job.model).sdpa:
            return f"attention=sdpa is unavailable for {job.model.name}: no fused kernel computes its layers, use eager"
        if config["attention"] != "flash":
            return None
        if job.hardware.kind != "cuda":
            return "attention=flash needs a CUDA device"
        if job.stack.flash_attn is None:
            return "attention=flash needs the flash-attn package, which is not installed here; sdpa has the same kernel"
        if config["precision"] == "fp32":
            return "attention=flash computes in 16 bits only"
        if (compute_capability(job.hardware.capability) or 8.0) < 8.0:  # AMD's never are
            return f"attention=flash needs compute capability 8.0, {job.hardware.name} has {job.hardware.capability}"
        return None

    def plan(self, plan: BuildPlan) -> None:
        plan.attention = IMPLEMENTATIONS[plan.config.text("attention")]
