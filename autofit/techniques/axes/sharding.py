"""Where parameters, gradients and states are: spread over devices, in host memory, or in files."""

from __future__ import annotations

import os

from autofit.catalog.models import shape
from autofit.core.distribution import install
from autofit.core.lattice import Axis, Config, chain
from autofit.techniques.axes.optimizer import kind_of
from autofit.techniques.axes.precision import is_mixed
from autofit.techniques.deepspeed_settings import deepspeed_settings, deepspeed_stage
from autofit.techniques.job import Job
from autofit.techniques.selective import BUDGETS, keeps_results
from autofit.techniques.technique import BuildPlan, Part, Technique

NVME_VARIABLE = "AUTOFIT_NVME_DIR"
"""Environment variable with the path of the folder for offload=nvme."""
SHARDINGS_OF_OFFLOAD = {
    "optimizer": ("none", "zero1", "zero2", "zero3"),
    "params": ("none", "zero3", "fsdp", "fsdp-no-reshard"),
    "nvme": ("none", "zero3"),
}
"""The values of `sharding` that each value of `offload` supports; with `none`, one device, DeepSpeed offloads."""


class Offload(Technique):
    """ZeRO-Offload (Ren et al. 2021) keeps states on the host, ZeRO-Infinity (Rajbhandari et al. 2021) in files."""

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
    parts = frozenset({Part.RANK})

    def unsupported(self, config: Config, job: Job) -> str | None:
        value, sharding = config.text("offload"), config.text("sharding")
        if value == "none":
            return None
        if sharding not in SHARDINGS_OF_OFFLOAD[value]:
            alternatives = ", ".join(name for name in SHARDINGS_OF_OFFLOAD[value] if name != "none")
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


class Sharding(Technique):
    """DeepSpeed's ZeRO (Rajbhandari et al. 2020), torch's `fully_shard` or DistributedDataParallel."""

    axis = Axis(
        name="sharding",
        values=("zero3", "fsdp", "fsdp-no-reshard", "zero2", "zero1", "ddp", "none"),
        recipe="none",
        # No claim between libraries, nor between ZeRO stages: each has buffers of its own, which outweigh what it
        # saves if few parameters are trained.
        lighter=frozenset({("fsdp", "fsdp-no-reshard")}),
        does="How weights, gradients and states are spread over devices.",
        meanings={
            "zero3": "all three sharded by DeepSpeed",
            "fsdp": "all three sharded by torch; optimizer=adamw",
            "fsdp-no-reshard": "the same, with gathered weights kept until the backward pass",
            "zero2": "gradients and states sharded by DeepSpeed",
            "zero1": "states sharded by DeepSpeed",
            "ddp": "everything on every device, gradients summed",
            "none": "one device",
        },
        where="several --devices, but for none",
    )
    parts = frozenset({Part.RANK})

    def unsupported(self, config: Config, job: Job) -> str | None:
        value, devices = config.text("sharding"), job.workload.devices
        if value == "none" and devices > 1:
            return "sharding=none, the default, is for one device: add sharding=ddp, zero1, zero2, zero3 or fsdp"
        if value != "none" and devices == 1:
            return f"sharding={value} needs several devices to share between: use --devices, or sharding=none"
        if uses_deepspeed(config):
            return _why_not_by_deepspeed(config, job)
        return _why_not_by_fsdp(config, job) if value.startswith("fsdp") else None

    def plan(self, plan: BuildPlan) -> None:
        if plan.autocast is not None and has_own_mixed_precision(plan.config):
            plan.autocast, plan.narrowed = None, True
        if uses_deepspeed(plan.config):
            plan.deepspeed = deepspeed_settings(plan.config, plan.job, folder=os.environ.get(NVME_VARIABLE))


def needs_process_group(config: Config) -> bool:
    """Whether training `config` needs torch.distributed: for several ranks, or for DeepSpeed, even with one rank."""
    return config["sharding"] != "none" or config["offload"] != "none"


def micro_steps_run(accumulation: int, config: Config) -> int:
    """How many of a step's micro-steps a trial runs. Two show the true peak (the second runs with the first one's
    gradients in memory) and the time of each further one; where ranks or a host share the work, the last one differs
    from these, so there are three."""
    return min(accumulation, 3 if needs_process_group(config) else 2)


def gathers_weights(config: Config) -> bool:
    """Whether no device keeps the whole of the weights: they are sharded or offloaded, and come as they are needed."""
    return config.text("sharding").startswith(("fsdp", "zero3")) or config["offload"] in ("params", "nvme")


def has_own_mixed_precision(config: Config) -> bool:
    """Whether the library that holds the parameters also converts them to 16 bits, in place of autocast."""
    return needs_process_group(config) and config["sharding"] != "ddp"


def rounds_master_weights(config: Config) -> bool:
    """Whether the master weights start from weights rounded to 16 bits: DeepSpeed copies those that it trains with.

    The first updates are then lost in rounding, those of embeddings and norms included, and the losses fall later than
    they do with autocast over fp32 weights.
    """
    return uses_deepspeed(config) and is_mixed(config)


def uses_deepspeed(config: Config) -> bool:
    """Whether DeepSpeed trains `config`: in its ZeRO stages, and with any offloading on one device."""
    sharding = config.text("sharding")
    return sharding.startswith("zero") or (sharding == "none" and config["offload"] != "none")


def _why_not_by_fsdp(config: Config, job: Job) -> str | None:
    if not shape(job.model).checkpointable:
        return f"fsdp shards layer by layer, and transformers does not mark the layers of {job.model.name}: use ddp"
    optimizer = kind_of(config)
    if not optimizer.updates_shards:
        instead = "adamw" if optimizer.does_to_matrices else "adamw, or zero2 or zero3, which shard flat"
        return (
            f"optimizer={config['optimizer']} cannot update FSDP's sharded tensors, for which its kernel is not "
            f"written: use {instead}"
        )
    # Earlier versions of torch made every shard require gradients, which integers cannot have (`_init_sharded_param` in
    # torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
    if config["method"] == "qlora" and job.stack.torch_release < (2, 12):
        return f"fsdp shards packed 4-bit weights from torch 2.12 on, and this is {job.stack.torch}: use ddp"
    return None


def _why_not_by_deepspeed(config: Config, job: Job) -> str | None:
    setting = "sharding=" + config.text("sharding") if config["sharding"] != "none" else f"offload={config['offload']}"
    zero3 = deepspeed_stage(config) == 3
    if job.stack.deepspeed is None:
        return f"{setting} needs deepspeed, which is not installed here ({install()})"
    if job.hardware.kind not in ("cpu", "cuda", "xpu"):
        return f"{setting} cannot work: DeepSpeed has no ZeRO for {job.hardware.kind}"
    if config["precision"] == "fp16-mixed" and job.hardware.kind == "cpu":
        return (
            f"{setting} cannot work with fp16-mixed: DeepSpeed refuses fp16 on processors; use bf16-mixed, fsdp or ddp"
        )
    if does := kind_of(config).does_to_matrices:
        return (
            f"optimizer={config['optimizer']} would be a different optimizer with {setting}: it {does} matrices, which "
            "DeepSpeed flattens; use adamw, or sharding=ddp"
        )
    if zero3 and not shape(job.model).checkpointable:
        return f"{setting} cannot work: transformers does not mark the layers of {job.model.name}; use zero2 or ddp"
    if zero3 and keeps_results(config):
        return (
            f"checkpointing={config['checkpointing']} cannot work with {setting}: it repeats a layer operation "
            "by operation, and ZeRO-3's gathering among them differs the second time; use full, every-2 or none"
        )
    if zero3 and config["checkpointing"] in BUDGETS:
        return (
            f"checkpointing={config['checkpointing']} cannot work with {setting}: ZeRO-3 gathers parameters within a "
            "layer, which torch then compiles in pieces; use full, every-2 or none"
        )
    return None


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
