"""What Hugging Face's trainers, and those built on them, call the axes: refusals name ours, `autofit axes` theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autofit.core.errors import UsageError, unknown
from autofit.core.lattice import Axis
from autofit.techniques.axes.optimizer import OPTIMIZERS


@dataclass(frozen=True, slots=True, kw_only=True)
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


TRAINER_NAMES = (
    TrainerName(
        keys=("load_in_4bit", "qlora", "use_qlora"), target="method", values={"true": "qlora", "false": "lora"}
    ),
    TrainerName(keys=("quantization_bit",), target="method", values={"4": "qlora"}),
    TrainerName(keys=("use_peft", "use_lora", "lora"), target="method", values={"true": "lora", "false": "full"}),
    TrainerName(keys=("adapter", "finetuning_type"), target="method", values={m: m for m in ("qlora", "lora", "full")}),
    TrainerName(keys=("lora_r", "r", "lora_rank"), target="rank"),
    TrainerName(
        keys=("target_modules", "lora_target_modules", "lora_target", "lora_target_linear"),
        target="targets",
        values={"all-linear": "all-linear", "all": "all-linear", "true": "all-linear"},
    ),
    TrainerName(keys=("bf16",), target="precision", values={"true": "bf16-mixed", "false": "fp32"}),
    TrainerName(keys=("fp16",), target="precision", values={"true": "fp16-mixed", "false": "fp32"}),
    TrainerName(keys=("tf32", "allow_tf32"), target="precision", values={"true": "tf32", "false": "fp32"}),
    TrainerName(
        keys=("mixed_precision",), target="precision", values={"bf16": "bf16-mixed", "fp16": "fp16-mixed", "no": "fp32"}
    ),
    TrainerName(
        keys=("dtype", "torch_dtype"),
        target="precision",
        values={"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32"},
    ),
    TrainerName(
        keys=("per_device_train_batch_size", "batch_size", "train_batch_size", "micro_batch_size"), target="micro_batch"
    ),
    TrainerName(
        keys=("gradient_checkpointing", "activation_checkpointing", "use_gradient_checkpointing"),
        target="checkpointing",
        values={"true": "full", "false": "none", "unsloth": "offload"},
    ),
    TrainerName(keys=("every_n_layers",), target="checkpointing", values={n: f"every-{n}" for n in ("2", "4")}),
    TrainerName(keys=("activation_offloading",), target="checkpointing", values={"true": "offload"}),
    TrainerName(
        keys=("optim", "optimizer_name", "optimizer_type"),
        target="optimizer",
        values={"adamw_8bit": "adamw-8bit", **{kind.trainer: value for value, kind in OPTIMIZERS.items()}},
    ),
    TrainerName(
        keys=("attn_implementation", "flash_attn", "flash_attention"),
        target="attention",
        values={
            **{name: name for name in ("sdpa", "eager")},
            **dict.fromkeys(("flash_attention_2", "fa2", "true"), "flash"),
            **dict.fromkeys(("false", "disabled"), "sdpa"),
        },
    ),
    TrainerName(
        keys=("use_liger_kernel", "use_liger", "enable_liger_kernel"),
        target="loss",
        values={"true": "fused", "liger": "fused", "false": "full"},
    ),
    TrainerName(
        keys=("use_liger_kernel", "use_liger", "enable_liger_kernel"),
        target="kernels",
        values={"true": "liger", "false": "torch"},
    ),
    TrainerName(
        keys=("train_sampling_strategy",), target="batching", values={"group_by_length": "grouped", "random": "padded"}
    ),
    TrainerName(keys=("group_by_length",), target="batching", values={"true": "grouped", "false": "padded"}),
    TrainerName(keys=("packing", "sample_packing"), target="batching", values={"true": "packed", "false": "padded"}),
    TrainerName(
        keys=("padding_free", "neat_packing"), target="batching", values={"true": "padding-free", "false": "padded"}
    ),
    TrainerName(keys=("torch_compile",), target="compile", values={"true": "true", "false": "false"}),
    TrainerName(
        keys=("offload_optimizer", "offload_optimizer_device"),
        target="offload",
        values={"true": "optimizer", "cpu": "optimizer", "nvme": "nvme", "false": "none", "none": "none"},
    ),
    TrainerName(
        keys=("offload_param", "offload_param_device", "offload_params", "cpu_offload"),
        target="offload",
        values={"true": "params", "cpu": "params", "nvme": "nvme", "false": "none", "none": "none"},
    ),
    TrainerName(
        keys=("deepspeed", "zero_stage", "stage"), target="sharding", values={n: f"zero{n}" for n in ("1", "2", "3")}
    ),
    TrainerName(keys=("fsdp",), target="sharding", values={"true": "fsdp", "full_shard": "fsdp"}),
    TrainerName(
        keys=("max_length", "max_seq_length", "seq_len", "sequence_len", "cutoff_len", "model_max_length"),
        target="--seq-len",
    ),
    TrainerName(keys=("lora_dropout",), target="--lora-dropout"),
    TrainerName(keys=("global_batch", "global_batch_size"), target="--global-batch"),
    TrainerName(keys=("num_processes", "num_gpus", "nproc_per_node", "devices"), target="--devices"),
    TrainerName(keys=("per_device_eval_batch_size", "eval_batch_size", "eval_batch"), target="--eval-batch"),
    TrainerName(keys=("memory_limit", "max_memory"), target="--memory-limit"),
    TrainerName(keys=("model", "model_name_or_path", "base_model"), target="--model"),
    TrainerName(keys=("seed",), target="--seed"),
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
