"""The trainers whose own files are read, and which one a file is of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autofit.core.errors import UsageError, unknown
from autofit.export import axolotl_format, llamafactory_format, trl_format
from autofit.export.document import Emit
from autofit.trainers import axolotl, llamafactory, training_arguments, trl
from autofit.trainers.keys import Keys, known_keys
from autofit.trainers.run import Run, Where
from autofit.trainers.sharded import saves_in_shards, synchronises


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFiles:
    """One trainer: how its file is read, and how it says a config."""

    name: str
    """Also its name in `known_keys.yaml`."""
    model_key: str | None
    """The key that every file of it has, and that names the model."""
    reader: Callable[[Keys, Where], Run]
    marks: frozenset[str] = frozenset()
    """Keys of its own arguments, any of which shows that a file that names no model is of it."""
    table: Mapping[str, Emit]
    """Each axis and its translation, as in exports."""
    other_spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Axis -> keys that the table does not write, which say it otherwise: an edit takes them out."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Key that the table writes -> its name in other versions, with the same values: an edit keeps the user's."""

    def read(self, values: Mapping[str, Any], where: Where) -> Run:
        """The run that a file's keys ask for. Raises `UsageError` for a value that the trainer would refuse."""
        keys = Keys(values, self.name)
        run = self.reader(keys, where)
        return replace(
            run,
            synchronises=synchronises(keys, where),
            saves_in_shards=run.config.text("sharding").startswith("fsdp") and saves_in_shards(keys, where),
            notes=tuple(dict.fromkeys(keys.notes)),
            assumed=tuple(dict.fromkeys(keys.assumed)),
            not_counted=keys.not_counted,
            unknown=keys.unknown,
        )


READERS: Mapping[str, TrainerFiles] = {
    trainer.name: trainer
    for trainer in (
        TrainerFiles(
            name="axolotl",
            model_key="base_model",
            reader=axolotl.read,
            table=axolotl_format.TABLE,
            other_spellings={
                "attention": tuple(axolotl.OLD_FLAGS),
                "kernels": ("liger_swiglu",),
                "micro_batch": ("batch_size",),
                "precision": ("bfloat16", "float16"),
            },
        ),
        TrainerFiles(
            name="llamafactory",
            model_key="model_name_or_path",
            reader=llamafactory.read,
            table=llamafactory_format.TABLE,
            other_spellings={
                **training_arguments.OTHER_SPELLINGS,
                **dict.fromkeys(("loss", "kernels"), ("use_liger_kernel",)),
            },
        ),
        TrainerFiles(
            name="trl",
            model_key="model_name_or_path",
            reader=trl.read,
            marks=trl.OF_SFT_CONFIG,
            table=trl_format.TABLE,
            other_spellings=training_arguments.OTHER_SPELLINGS,
            aliases={"dtype": "torch_dtype", **training_arguments.ALIASES},
        ),
        TrainerFiles(
            name="transformers",
            model_key=None,
            reader=training_arguments.read,
            table=training_arguments.TABLE,
            other_spellings=training_arguments.OTHER_SPELLINGS,
            aliases=training_arguments.ALIASES,
        ),
    )
}
OTHERS: Mapping[str, str] = {
    "zero_optimization": "a DeepSpeed configuration: name the trainer's file, which points to it",
    "compute_environment": "a file for `accelerate launch`: name the trainer's file",
    "distributed_type": "a file for `accelerate launch`: name the trainer's file",
    "architectures": "a model's config.json: give it as --model",
    "peft_type": "an adapter's configuration: name the trainer's file",
    "kernel_config": "a file of LLaMA-Factory's new engine (examples/v1), which autofit does not read",
    "dist_config": "a file of LLaMA-Factory's new engine (examples/v1), which autofit does not read",
    "reward_funcs": "a file of trl's GRPO trainer: autofit reads those of `trl sft`",
    "num_generations": "a file of trl's GRPO trainer: autofit reads those of `trl sft`",
    "max_prompt_length": "a file of one of trl's preference trainers: autofit reads those of `trl sft`",
    "beta": "a file of one of trl's preference trainers: autofit reads those of `trl sft`",
    "apiVersion": "a Kubernetes manifest",
    "services": "a Docker Compose file",
    "tokenizer._component_": "a torchtune recipe, which autofit does not read",
}
"""What a file is that has one of these keys and is no trainer's."""


def trainer_named(name: str) -> TrainerFiles:
    """The trainer of this name. Raises `UsageError` for an unknown one."""
    if name.lower() not in READERS:
        raise unknown("trainer", name, READERS)
    return READERS[name.lower()]


def recognised(values: Mapping[str, Any]) -> TrainerFiles:
    """The trainer that a file is of, by the keys that only one has. Raises `UsageError` where that is not sure."""
    for key, description in OTHERS.items():
        parent, _, inner = key.partition(".")
        if parent in values and (not inner or (isinstance(values[parent], dict) and inner in values[parent])):
            raise UsageError(f"this is {description}")
    with_model = [t for t in READERS.values() if t.model_key is not None and t.model_key in values]
    if not with_model:
        arguments = values.keys() & known_keys("transformers").all
        if "per_device_train_batch_size" in arguments or ("output_dir" in arguments and len(arguments) > 2):
            arguments_only = READERS["transformers"]  # where a script makes the model, the file has no keys of it
            marked = (replace(t, table=arguments_only.table) for t in READERS.values() if t.marks & values.keys())
            return next(marked, arguments_only)
        first_names = ", ".join(map(str, list(values)[:4])) + (", ..." if len(values) > 4 else "")
        raise UsageError(
            f"no trainer's file has the keys {first_names}: looked for base_model (axolotl), model_name_or_path "
            "(LLaMA-Factory, trl) and per_device_train_batch_size (TrainingArguments); --trainer names the trainer"
        )
    listed = Counter(key for name in READERS for key in known_keys(name).all)
    own_keys = {t.name: {t.model_key} | {key for key in known_keys(t.name).all if listed[key] == 1} for t in with_model}
    counts = {name: len(values.keys() & keys) for name, keys in own_keys.items()}
    best = max(counts.values())
    candidates = [name for name, count in counts.items() if count == best]
    if len(candidates) > 1:
        raise UsageError(f"this may be a file of {' or '.join(candidates)}: say which with --trainer")
    return READERS[candidates[0]]
