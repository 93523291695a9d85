"""Trainers whose habits a trial can have: what `--for` names."""

from __future__ import annotations

from autofit.core.lattice import Config
from autofit.techniques.axes.batching import packs
from autofit.techniques.axes.kernels import MODEL_TYPES, by_liger
from autofit.techniques.axes.optimizer import kind_of
from autofit.techniques.axes.precision import is_mixed
from autofit.techniques.habits.habit import Habit, TiledLoss, UnderAutocast, UpcastBeside4Bit, WeightFormat
from autofit.techniques.habits.known_trainers import TRAINERS as TRAINERS
from autofit.techniques.habits.known_trainers import trainer_by_name as trainer_by_name
from autofit.techniques.job import Job


def habits(config: Config, trainer: str | None) -> tuple[Habit, ...]:
    """What a workload's trainer adds to the config's step, in the order in which it is applied."""
    return tuple(habit for habit in trainer_by_name(trainer).habits if habit.applies(config))


def has_habit(kind: type[Habit], config: Config, trainer: str | None) -> bool:
    """Whether a workload's trainer adds a habit of this kind to the config's step."""
    return any(isinstance(habit, kind) and habit.applies(config) for habit in trainer_by_name(trainer).habits)


def replaces_loss(job: Job) -> bool:
    """Whether the workload's trainer computes the loss in a way of its own."""
    return any(isinstance(habit, TiledLoss) for habit in trainer_by_name(job.workload.trainer).habits)


def is_under_autocast(config: Config, job: Job) -> bool:
    """Whether the workload's trainer runs the forward pass under autocast, which the config alone would not."""
    return has_habit(UnderAutocast, config, job.workload.trainer)


def widens_attention(config: Config, job: Job) -> bool:
    """Whether queries, keys and values are fp32 because the workload's trainer has hidden states so, without
    autocast."""
    widened = has_habit(UpcastBeside4Bit, config, job.workload.trainer)
    return widened and not is_mixed(config) and not is_under_autocast(config, job)


def masks_padding(config: Config, job: Job) -> bool:
    """Whether micro-batches of several sequences are padded and the trainer says where, as all known do.

    Their collators give a mask of real tokens (`DataCollatorForLanguageModeling` of trl 1.16, `DataCollatorForSeq2Seq`
    of transformers 5.23, which axolotl and LLaMA-Factory use), and with sdpa transformers leaves one out only if every
    token is real (`_ignore_causal_mask_sdpa` of masking_utils.py). With a mask torch has no flash kernel, and keys and
    values are repeated for all heads (`use_gqa_in_sdpa` of integrations/sdpa_attention.py). The flash-attn package
    takes the padding out instead.
    """
    return job.workload.masks_padding and config["attention"] != "flash" and not packs(config)


def of_formats(config: Config, trainer: str | None) -> tuple[WeightFormat, ...]:
    """The habits that change the number format of weights."""
    return tuple(habit for habit in habits(config, trainer) if isinstance(habit, WeightFormat))


def trained_format(config: Config, trainer: str | None) -> str | None:
    """Torch's name for the format that the trainer gives the trained weights; None for the config's own."""
    formats = of_formats(config, trainer)
    return formats[-1].trained if formats else None


def unsupported(config: Config, job: Job) -> str | None:
    """Why the workload's trainer trains something else than the config says; None if it does not."""
    trainer = trainer_by_name(job.workload.trainer)
    if config["precision"] == "fp16-mixed" and trained_format(config, job.workload.trainer) == "bfloat16":
        difference = "trains the adapters in bf16, for which torch refuses loss scaling"
        return f"precision=fp16-mixed is not possible with {trainer.name}, which {difference}"
    if job.workload.trainer is not None and kind_of(config).trainer is None:
        return f"optimizer={config['optimizer']} is not possible with {trainer.name}, which has no name for it"
    fused = config["loss"] == "fused"
    if fused and trainer.leaves_liger_out(job.model):
        return f"loss=fused is not possible with {trainer.name}, which leaves Liger out for {job.model.name}"
    has_kernels = job.model.config["model_type"] in MODEL_TYPES
    if trainer.has_one_liger_switch and has_kernels and by_liger(config) != fused:
        value, partner = ("kernels=liger", "loss=fused") if by_liger(config) else ("loss=fused", "kernels=liger")
        return f"{value} without {partner} is not possible with {trainer.name}, which has one switch for both"
    return trainer.unsupported(config)
