"""A config in terms of transformers' TrainingArguments, which trl and other trainers inherit."""

from __future__ import annotations

from autofit.errors import unknown
from autofit.export import distributed
from autofit.export.document import Settings, Task, settings
from autofit.lattice import Config, Value
from autofit.techniques.adapters import attention_projections
from autofit.techniques.offload import Offload
from autofit.techniques.optimizer import weight_decay
from autofit.techniques.sharding import Sharding
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
"""`optim` of each optimizer, in the spelling that every transformers since 4.50 accepts."""

FILLED = ("lr", "betas", "eps", "weight_decay")
"""Arguments of DeepSpeed's own optimizer that Trainer fills in from its own arguments."""

SYNCHRONISED = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
"""`accelerator_config` with FSDP: gradients are reduced after each micro-batch, as was measured; waiting for the last
keeps them unsharded until then."""

_COMPUTE = {"bf16": "bfloat16", "bf16-mixed": "bfloat16", "fp16-mixed": "float16", "fp32": "float32"}


def named(axis: str, value: Value, names: dict[str, str]) -> str:
    """The target format's name for `value`; raises `UsageError` for a value that is not in `names`."""
    if str(value) not in names:
        raise unknown(f"value of {axis}", value, names)
    return names[str(value)]


def compute_dtype(config: Config) -> str:
    """Torch's name for the dtype of matrix products and of frozen weights."""
    return named("precision", config["precision"], _COMPUTE)


def trained_dtype(task: Task) -> str:
    """Torch's name for the dtype of the weights that the optimizer updates.

    DeepSpeed itself keeps higher-precision copies, with the optimizer.
    """
    config = task.config
    if config["precision"] == "bf16":
        return "bfloat16"
    return compute_dtype(config) if distributed.by_deepspeed(task) else "float32"


def load_dtype(task: Task) -> str:
    """Torch's name for the dtype to load in: that of the trained weights for `full`, else that of the frozen base."""
    return trained_dtype(task) if task.config["method"] == "full" else compute_dtype(task.config)


def autocast_flags(task: Task) -> dict[str, object]:
    """The arguments `bf16` and `fp16`, which turn on mixed precision. For pure bf16 both are off, and the model is
    loaded in bf16.

    Under DeepSpeed they must agree with its own configuration, which says `bf16` for pure and for mixed bf16 alike.
    """
    value = task.config["precision"]
    bf16 = value == "bf16-mixed" or (value == "bf16" and distributed.by_deepspeed(task))
    return {"bf16": bf16, "fp16": value == "fp16-mixed"}


def run(task: Task) -> dict[str, object]:
    """Arguments that no axis decides: clipping as in trials, the output folder, and the CPU if that was measured."""
    where: dict[str, object] = {"use_cpu": True} if task.recommendation.hardware.kind == "cpu" else {}
    return {
        "output_dir": "autofit-run",
        "max_grad_norm": MAX_GRADIENT_NORM,
        # The filter synchronises with the device after each micro-batch; trials do not.
        "logging_nan_inf_filter": False,
        **where,
    }


def batch(value: Value, task: Task) -> Settings:
    """Micro-batch size and accumulation steps that give the workload's global batch."""
    size = int(value)
    return settings(
        training={
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": task.workload.batch_per_device // size,
            "auto_find_batch_size": False,
        }
    )


def optimizer(value: Value, task: Task) -> Settings:
    """The argument `optim`, and the weight decay of trials."""
    notes = []
    if value == "adamw-foreach" and task.recommendation.hardware.kind == "cpu":
        notes.append(
            "optimizer=adamw-foreach: on a CPU Trainer's adamw_torch updates one tensor at a time: less memory "
            "than was measured"
        )
    name = named("optimizer", value, OPTIMIZERS)
    return settings(*notes, training={"optim": name, "weight_decay": weight_decay(value)})


def compilation(value: Value, task: Task) -> Settings:
    """The argument `torch_compile`."""
    if value is not True:
        return settings(training={"torch_compile": False})
    note = "compile=True: Trainer compiles the whole model, loss included, and lets fp32 products use TF32; trials "
    return settings(note + "compile the decoder alone", training={"torch_compile": True})


def offload(value: Value, task: Task) -> Settings:
    """No settings: those for offloading are written by `sharding`. A note if that cannot cover `value`."""
    Offload.axis.check(value)
    if distributed.offload_is_said(task):
        return settings()
    return settings(f"offload={value}: not possible with sharding={task.config['sharding']}; it is left out")


def sharding(value: Value, task: Task, *, narrow_sums: bool = True) -> Settings:
    """The argument `deepspeed` or `fsdp`, or what DDP needs; `narrow_sums` is as in `distributed.fsdp_notes`."""
    Sharding.axis.check(value)
    if distributed.by_deepspeed(task):
        return settings(training={"deepspeed": distributed.deepspeed_config(task, filled=FILLED)})
    if distributed.by_fsdp(task):
        return settings(*distributed.fsdp_notes(task, narrow_sums=narrow_sums), training=_fsdp(task))
    # Otherwise Trainer searches for parameters without a gradient at every step.
    return settings(training={"ddp_find_unused_parameters": False} if value == "ddp" else {})


def _fsdp(task: Task) -> dict[str, object]:
    return {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": distributed.reshards(task),
            "cpu_offload": task.config["offload"] == "params",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": distributed.sharded_layers(task),
        },
        "accelerator_config": SYNCHRONISED,
    }


def checkpointed_every(value: Value) -> int | None:
    """N if every N-th layer is checkpointed (1 for all layers), None for `none`; raises `UsageError`."""
    if value == "none":
        return None
    every = {"full": 1, "offload": 1, "selective": 1, "every-2": 2, "every-4": 4}
    if value not in every:
        raise unknown("value of checkpointing", value, [*every, "none"])
    return every[str(value)]


def target_modules(value: Value, task: Task) -> list[str] | str:
    """`target_modules` of a LoRA configuration, found in the architecture as in trials; raises `UsageError`."""
    if value == "attention":
        return attention_projections(task.laid_out())
    if value == "all-linear":
        return "all-linear"
    raise unknown("value of targets", value, ["attention", "all-linear"])


def is_part(task: Task) -> bool:
    """Whether the weights may be part of a larger checkpoint, such as a vision-language model's."""
    return str(task.model().config["model_type"]).endswith("_text")
