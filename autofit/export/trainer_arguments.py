"""What a config is called in transformers' TrainingArguments, which trl and other trainers inherit."""

from __future__ import annotations

from typing import Any

from autofit.catalog.models import Model, architecture
from autofit.errors import unknown
from autofit.export.document import Settings, Task, settings
from autofit.lattice import Config, Value
from autofit.techniques.adapters import attention_projections
from autofit.techniques.technique import MAX_GRADIENT_NORM

ATTENTION = {"sdpa": "sdpa", "flash": "flash_attention_2", "eager": "eager"}
"""`attn_implementation` of each attention."""

OPTIMIZERS = {
    "sgd": "sgd",
    "adafactor": "adafactor",
    "lion-8bit": "lion_8bit",
    "adamw-8bit": "adamw_bnb_8bit",
    "paged-adamw-8bit": "paged_adamw_8bit",
    "lion": "lion_32bit",
    "adamw": "adamw_torch_fused",
    "adamw-foreach": "adamw_torch",
}
"""`optim` of each optimizer, in the spelling that every transformers since 4.50 reads."""

_COMPUTE = {"bf16": "bfloat16", "bf16-mixed": "bfloat16", "fp16-mixed": "float16", "fp32": "float32"}


def named(axis: str, value: Value, names: dict[str, str]) -> str:
    """The target's name of `value`; raises `UsageError` for a value that it has no name for."""
    if str(value) not in names:
        raise unknown(f"value of {axis}", value, names)
    return names[str(value)]


def compute_dtype(config: Config) -> str:
    """Torch's name of the dtype of matrix products, and of weights that are frozen."""
    return named("precision", config["precision"], _COMPUTE)


def trained_dtype(config: Config) -> str:
    """Torch's name of the dtype of the weights that the optimizer updates."""
    return "bfloat16" if config["precision"] == "bf16" else "float32"


def load_dtype(config: Config) -> str:
    """Torch's name of the dtype to load in: of the trained weights for `full`, else of the frozen base."""
    return trained_dtype(config) if config["method"] == "full" else compute_dtype(config)


def autocast_flags(config: Config) -> dict[str, object]:
    """`bf16` and `fp16` ask for autocast. Pure bf16 is both off, and the model loaded in bf16."""
    return {"bf16": config["precision"] == "bf16-mixed", "fp16": config["precision"] == "fp16-mixed"}


def run(task: Task) -> dict[str, object]:
    """Arguments that no axis decides: clipping as trials do it, where results go, the CPU where that was measured."""
    where: dict[str, object] = {"use_cpu": True} if task.recommendation.hardware.kind == "cpu" else {}
    return {
        "output_dir": "autofit-run",
        "max_grad_norm": MAX_GRADIENT_NORM,
        # The filter waits for the device after each micro-batch; trials do not.
        "logging_nan_inf_filter": False,
        **where,
    }


def batch(value: Value, task: Task) -> Settings:
    """Micro-batch and accumulation that give the workload's global batch."""
    size = int(value)
    return settings(
        training={
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": task.workload.batch_per_device // size,
            "auto_find_batch_size": False,
        }
    )


def optimizer(value: Value, task: Task) -> Settings:
    """`optim`."""
    notes = []
    if value == "adamw-foreach" and task.recommendation.hardware.kind == "cpu":
        notes.append(
            "optimizer=adamw-foreach: on a CPU Trainer's adamw_torch updates one tensor after another: less memory "
            "than was measured"
        )
    return settings(*notes, training={"optim": named("optimizer", value, OPTIMIZERS)})


def offload(value: Value, task: Task) -> Settings:
    """Offloading needs DeepSpeed, whose configuration is another file."""
    if value == "none":
        return settings()
    return settings(f"offload={value}: needs a DeepSpeed configuration, which this format does not write")


def sharding(value: Value, task: Task) -> Settings:
    """DDP needs a launcher and nothing else; the others a configuration file of their own."""
    if value in ("none", "ddp"):
        return settings()
    library = "an FSDP" if value == "fsdp" else "a DeepSpeed"
    return settings(f"sharding={value}: needs {library} configuration, which this format does not write")


def checkpointed_every(value: Value) -> int | None:
    """N where every N-th layer is checkpointed (1 for all of them), None for `none`; raises `UsageError`."""
    if value == "none":
        return None
    every = {"full": 1, "offload": 1, "selective": 1, "every-2": 2, "every-4": 4}
    if value not in every:
        raise unknown("value of checkpointing", value, [*every, "none"])
    return every[str(value)]


def target_modules(value: Value, task: Task) -> list[str] | str:
    """`target_modules` of a LoRA configuration, found in the architecture as trials find them; raises `UsageError`."""
    if value == "attention":
        return attention_projections(laid_out(task.model()))
    if value == "all-linear":
        return "all-linear"
    raise unknown("value of targets", value, ["attention", "all-linear"])


def laid_out(model: Model) -> Any:
    """The model without storage. Imports torch and transformers, which takes seconds."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(architecture(model))


def is_part(task: Task) -> bool:
    """Whether the weights may lie in a checkpoint that holds other parts too, as of a vision model."""
    return str(task.model().config["model_type"]).endswith("_text")
