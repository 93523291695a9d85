"""Where optimizer states and parameters live."""

from __future__ import annotations

from autofit.catalog.models import shape
from autofit.core.lattice import Axis, Config, chain
from autofit.techniques.axes.sharding import uses_deepspeed
from autofit.techniques.job import Job
from autofit.techniques.technique import Technique

WITH = {
    "optimizer": ("none", "zero1", "zero2", "zero3"),
    "params": ("none", "zero3", "fsdp", "fsdp-no-reshard"),
    "nvme": ("none", "zero3"),
}
"""The values of `sharding` that each value of `offload` supports; with `none`, one device, DeepSpeed offloads."""


class Offload(Technique):
    """`none`: everything stays on the device. `optimizer`: states and update on the host (ZeRO-Offload, Ren et al.
    2021). `params`: parameters there too, fetched layer by layer. `nvme`: both in files (ZeRO-Infinity, Rajbhandari et
    al. 2021)."""

    axis = Axis(
        name="offload",
        values=("nvme", "params", "optimizer", "none"),
        recipe="none",
        lighter=chain("nvme", "params", "optimizer", "none"),
        does="Where weights and optimizer states live.",
        meanings={
            "nvme": "both in files; DeepSpeed, one device or zero3, not with precision=bf16 or method=qlora",
            "params": "both in host memory, weights fetched layer by layer; DeepSpeed, one device, zero3 or fsdp",
            "optimizer": "states and the update on the host; DeepSpeed, one device or ZeRO",
            "none": "everything on the device",
        },
        where="with DeepSpeed, optimizer=adamw",
    )

    def unsupported(self, config: Config, job: Job) -> str | None:
        value, sharding = config.text("offload"), config.text("sharding")
        if value == "none":
            return None
        if sharding not in WITH[value]:
            alternatives = ", ".join(name for name in WITH[value] if name != "none")
            return f"offload={value} cannot work with sharding={sharding}: use {alternatives}, or offload=none"
        if uses_deepspeed(config) and config["optimizer"] != "adamw":
            return f"offload={value} cannot work with optimizer={config['optimizer']}: {_why_not_on_the_host(config)}"
        return _why_not_in_files(config) if value == "nvme" else None

    def holds(self, lighter: Config, heavier: Config, job: Job) -> bool:
        """Only where all weights are trained, on an accelerator, with the same sharding. Adapters' states can be
        smaller than DeepSpeed's buffers, and what is offloaded from a CPU goes to the very memory it came from."""
        if heavier["offload"] == "optimizer":
            counts = shape(job.model)
            # Else the fp32 part of the embedding's gradient, which ZeRO-3 holds alongside the gradient, may use up what
            # moving the weights to the host saves: 4 bytes plus fragmentation, against 2 for each other parameter.
            if counts.embedding_parameters > 0.25 * counts.parameters:
                return False
        return lighter["method"] == "full" and job.hardware.kind != "cpu" and lighter["sharding"] == heavier["sharding"]


def _why_not_on_the_host(config: Config) -> str:
    """Why autofit does not have DeepSpeed update by another optimizer on the host. Read in deepspeed 0.19.8."""
    if config["optimizer"] == "lion":  # DeepSpeedCPULion of ops/lion/cpu_lion.py: exp_avg_sq
        return "there DeepSpeed's Lion has two states for each parameter, as many as Adam, and uses one; use adamw"
    return "there DeepSpeed updates by kernels of its own, and it has none for this optimizer; use adamw"


def _why_not_in_files(config: Config) -> str | None:
    """Why DeepSpeed's files, made for trained parameters, do not work for `config`. Observed with deepspeed 0.19.8."""
    if config["precision"] == "bf16":  # release_memory of OptimizerStateSwapInfo, then swap_in_optimizer_state
        return (
            "offload=nvme cannot work with precision=bf16: DeepSpeed takes what it has written to files for fp32; use "
            "bf16-mixed, or offload=params"
        )
    if config["method"] == "qlora":
        return (
            "offload=nvme cannot work with method=qlora: DeepSpeed's files have one number format, and packed 4-bit "
            "weights come back from them as something else; use offload=params, or lora"
        )
    if config["method"] == "lora" and config["checkpointing"] != "none":
        return (
            f"offload=nvme cannot work with method=lora and checkpointing={config['checkpointing']}: DeepSpeed reads a "
            "frozen weight a second time while it still has the first; use checkpointing=none, or offload=params"
        )
    return None
