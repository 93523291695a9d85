"""Number formats of weights, arithmetic, gradients and optimizer states."""

from __future__ import annotations

from autofit.catalog.hardware import Card
from autofit.core.device.hardware import Hardware, compute_capability
from autofit.core.lattice import Axis, Config
from autofit.core.workload import Effect
from autofit.techniques.job import Job
from autofit.techniques.technique import BuildPlan, Part, Technique


class Precision(Technique):
    """`bf16`: all in bf16. `bf16-mixed`, `fp16-mixed`: fp32 master weights under autocast; frozen weights in 16 bits.

    Mixed precision follows Micikevicius et al. 2017. Frozen weights need no master copy, so only adapters are fp32.
    `tf32`: as fp32, but tensor cores round what they multiply to 10 bits of mantissa, as in fp16.
    """

    axis = Axis(
        name="precision",
        values=("bf16", "bf16-mixed", "fp16-mixed", "tf32", "fp32"),
        effects=dict.fromkeys(("bf16", "fp16-mixed", "tf32", "fp32"), Effect.NUMERICS),
        recipe="bf16-mixed",
        # No claim between mixed precision and fp32: autocast keeps 16-bit copies of all weights, which with a small
        # batch outweigh what halving the activations saves.
        lighter=frozenset(("bf16", value) for value in ("bf16-mixed", "fp16-mixed", "tf32", "fp32")),
        does="The number format of weights, products, gradients and optimizer states.",
        meanings={
            "bf16": "everything in bf16; GPUs from Ampere on, and CPUs",
            "bf16-mixed": "products in bf16, trained weights in fp32; GPUs from Ampere on, and CPUs",
            "fp16-mixed": "products in fp16, trained weights in fp32; the default where bf16 is emulated",
            "tf32": "fp32 with faster, less exact products; NVIDIA GPUs from Ampere on",
            "fp32": "everything in fp32",
        },
    )
    parts = frozenset({Part.DECODER, Part.UPDATE, Part.EVALUATION})

    def unsupported(self, config: Config, job: Job) -> str | None:
        value = config.text("precision")
        if value in ("bf16", "bf16-mixed") and not has_bf16(job.hardware):
            return f"precision={value} is only emulated on {job.hardware.name}: use fp16-mixed"
        has_tf32 = job.hardware.is_nvidia and (compute_capability(job.hardware.capability) or 8.0) >= 8.0
        if value == "tf32" and not has_tf32:
            return f"precision=tf32 needs an NVIDIA GPU of compute capability 8.0 or higher, not {job.hardware.name}"
        return None

    def plan(self, plan: BuildPlan) -> None:
        import torch

        formats = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        compute, mixed = formats[product_format(plan.config)], is_mixed(plan.config)
        plan.autocast = compute if mixed else None
        # fp16 alone is no choice: it is how DeepSpeed and FSDP compute fp16-mixed, and traced as such.
        plan.trained_dtype, plan.compute_dtype = torch.float32 if mixed else compute, compute
        plan.loss_scaling = plan.config["precision"] == "fp16-mixed"


def is_mixed(config: Config) -> bool:
    """Whether trained weights have another number format than the products that they enter."""
    return config.text("precision").endswith("-mixed")


def product_format(config: Config) -> str:
    """The number format of what products take and give: `bf16`, `fp16` or `fp32`."""
    return {"tf32": "fp32"}.get(config.text("precision"), config.text("precision").removesuffix("-mixed"))


def in_tf32(config: Config) -> bool:
    """Whether products of fp32 matrices round these to TF32."""
    return config["precision"] == "tf32"


def has_bf16(hardware: Hardware | Card) -> bool:
    """Whether bf16 is worth using on `hardware`. A CPU may emulate it too, but has no better 16-bit format."""
    return hardware.bf16 or hardware.kind != "cuda"


def mixed_precision(hardware: Hardware | Card) -> str:
    """The plain recipe's precision on `hardware`."""
    return "bf16-mixed" if has_bf16(hardware) else "fp16-mixed"
