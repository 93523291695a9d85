"""What Hugging Face's trainers, and those built on them, call the axes: refusals name ours, `autofit axes` theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autofit.core.errors import UsageError, unknown
from autofit.core.lattice import Axis
from autofit.techniques.axes.optimizer import OPTIMIZERS


@dataclass(frozen=True, slots=True)
class TrainerName:
    """Keys of trainers that mean one axis, or one option of the command line."""

    keys: tuple[str, ...]
    """The first is Hugging Face's own."""
    target: str
    """An axis, or an option, which begins with `--`."""
    values: Mapping[str, str] | None = None
    """The trainer's values, in lower case, to autofit's; None where they are the same."""

    def ours(self, value: object) -> str | None:
        """The axis or option with autofit's value for a trainer's, as it is written; None if there is none."""
        spelling = str(value).strip().lower()
        value = spelling if self.values is None else self.values.get(spelling)
        return None if value is None else f"{self.target}{' ' if self.target.startswith('--') else '='}{value}"

    def theirs(self, value: str) -> str | None:
        """A trainer's key with its first value for autofit's, as it is written; None if there is none."""
        spelling = next((key for key, axis_value in (self.values or {}).items() if axis_value == value), None)
        return None if spelling is None else f"{self.keys[0]}={spelling}"


_LIGER = ("use_liger_kernel", "use_liger", "enable_liger_kernel")

TRAINER_NAMES = (
    TrainerName(("load_in_4bit", "qlora", "use_qlora"), "method", {"true": "qlora", "false": "lora"}),
    TrainerName(("quantization_bit",), "method", {"4": "qlora"}),
    TrainerName(("use_peft", "use_lora", "lora"), "method", {"true": "lora", "false": "full"}),
    TrainerName(("adapter", "finetuning_type"), "method", {m: m for m in ("qlora", "lora", "full")}),
    TrainerName(("lora_r", "r", "lora_rank"), "rank"),
    TrainerName(
        ("target_modules", "lora_target_modules", "lora_target", "lora_target_linear"),
        "targets",
        dict.fromkeys(("all-linear", "all", "true"), "all-linear"),
    ),
    TrainerName(("bf16",), "precision", {"true": "bf16-mixed", "false": "fp32"}),
    TrainerName(("fp16",), "precision", {"true": "fp16-mixed", "false": "fp32"}),
    TrainerName(("tf32", "allow_tf32"), "precision", {"true": "tf32", "false": "fp32"}),
    TrainerName(("mixed_precision",), "precision", {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "no": "fp32"}),
    TrainerName(
        ("dtype", "torch_dtype"), "precision", {"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32"}
    ),
    TrainerName(("per_device_train_batch_size", "batch_size", "train_batch_size", "micro_batch_size"), "micro_batch"),
    TrainerName(
        ("gradient_checkpointing", "activation_checkpointing", "use_gradient_checkpointing"),
        "checkpointing",
        {"true": "full", "false": "none", "unsloth": "offload"},
    ),
    TrainerName(("every_n_layers",), "checkpointing", {n: f"every-{n}" for n in ("2", "4")}),
    TrainerName(("activation_offloading",), "checkpointing", {"true": "offload"}),
    TrainerName(
        ("optim", "optimizer_name", "optimizer_type"),
        "optimizer",
        {"adamw_8bit": "adamw-8bit", **{kind.trainer: value for value, kind in OPTIMIZERS.items() if kind.trainer}},
    ),
    TrainerName(
        ("attn_implementation", "flash_attn", "flash_attention"),
        "attention",
        {
            **{name: name for name in ("sdpa", "eager")},
            **dict.fromkeys(("flash_attention_2", "fa2", "true"), "flash"),
            **dict.fromkeys(("false", "disabled"), "sdpa"),
        },
    ),
    TrainerName(_LIGER, "loss", {"true": "fused", "liger": "fused", "false": "full"}),
    TrainerName(_LIGER, "kernels", {"true": "liger", "false": "torch"}),
    TrainerName(("tiled_mlp",), "mlp", {"true": "tiled", "false": "whole"}),
    TrainerName(("train_sampling_strategy",), "batching", {"group_by_length": "grouped", "random": "padded"}),
    TrainerName(("group_by_length",), "batching", {"true": "grouped", "false": "padded"}),
    TrainerName(("packing", "sample_packing"), "batching", {"true": "packed", "false": "padded"}),
    TrainerName(("padding_free", "neat_packing"), "batching", {"true": "padding-free", "false": "padded"}),
    TrainerName(("torch_compile",), "compile", {"true": "true", "false": "false"}),
    TrainerName(
        ("offload_optimizer", "offload_optimizer_device"),
        "offload",
        {"true": "optimizer", "cpu": "optimizer", "nvme": "nvme", "false": "none", "none": "none"},
    ),
    TrainerName(
        ("offload_param", "offload_param_device", "offload_params", "cpu_offload"),
        "offload",
        {"true": "params", "cpu": "params", "nvme": "nvme", "false": "none", "none": "none"},
    ),
    TrainerName(("deepspeed", "zero_stage", "stage"), "sharding", {n: f"zero{n}" for n in ("1", "2", "3")}),
    TrainerName(("fsdp",), "sharding", {"true": "fsdp", "full_shard": "fsdp"}),
    TrainerName(
        ("max_length", "max_seq_length", "seq_len", "sequence_len", "cutoff_len", "model_max_length"), "--seq-len"
    ),
    TrainerName(("lora_dropout",), "--lora-dropout"),
    TrainerName(("global_batch", "global_batch_size"), "--global-batch"),
    TrainerName(("num_processes", "num_gpus", "nproc_per_node", "devices"), "--devices"),
    TrainerName(("per_device_eval_batch_size", "eval_batch_size", "eval_batch"), "--eval-batch"),
    TrainerName(("memory_limit", "max_memory"), "--memory-limit"),
    TrainerName(("model", "model_name_or_path", "base_model"), "--model"),
    TrainerName(("seed",), "--seed"),
)
FOLLOWS = {
    "gradient_accumulation_steps": "it follows from --global-batch, micro_batch and --devices",
    **dict.fromkeys(
        ("learning_rate", "lr", "lora_alpha", "weight_decay", "warmup_steps", "lr_scheduler_type", "num_train_epochs"),
        "it changes neither memory nor speed",
    ),
}
"""Keys of trainers to which no axis or option corresponds, and why."""


def not_an_axis(name: str, value: object, axes: Mapping[str, Axis]) -> UsageError:
    """The error for a config's key that is no axis: it names the axis that a trainer's key means, else the nearest."""
    key = name.lower().replace("-", "_")
    if key in FOLLOWS:
        return UsageError(f"unknown axis {name!r}: {FOLLOWS[key]}, so leave it out")
    trainer_names = [trainer_name for trainer_name in TRAINER_NAMES if key in trainer_name.keys]
    pairs = [(trainer_name.target, trainer_name.ours(value)) for trainer_name in trainer_names]
    settings = [pair for target, pair in pairs if pair and (target not in axes or _is_valid(axes[target], pair))]
    if settings:
        return UsageError(f"unknown axis {name!r}: write {','.join(settings)}")
    if trainer_names:
        values = ", ".join(map(str, axes[trainer_names[0].target].values)) or "a whole number"
        return UsageError(f"unknown axis {name!r}: here it is {trainer_names[0].target}, with one of: {values}")
    return unknown("axis", name, axes)


def not_a_value(error: UsageError, axis: Axis, value: str) -> UsageError:
    """`error`, which refuses an axis's value, or one that names autofit's value if trainers write it so."""
    settings = (trainer_name.ours(value) for trainer_name in names_of(axis.name) if trainer_name.values is not None)
    setting = next((pair for pair in settings if pair is not None and _is_valid(axis, pair)), None)
    return error if setting is None else UsageError(f"unknown value of {axis.name} {value!r}: write {setting}")


def _is_valid(axis: Axis, pair: str) -> bool:
    try:
        axis.parse(pair.partition("=")[2])
    except UsageError:
        return False
    return True


def names_of(axis: str) -> Sequence[TrainerName]:
    return [trainer_name for trainer_name in TRAINER_NAMES if trainer_name.target == axis]
