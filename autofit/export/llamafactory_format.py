"""YAML for `llamafactory-cli train FILE`.

Keys and their meaning are those of LLaMA-Factory's version in `known_trainers`: src/llamafactory/hparams (which adds to
transformers' Seq2SeqTrainingArguments), model/adapter.py and model/model_utils, at github.com/hiyouga/LLaMA-Factory.
"""

from __future__ import annotations

from collections.abc import Mapping

from autofit.core.lattice import Value
from autofit.export import distributed
from autofit.export import trainer_arguments as ta
from autofit.export.document import Emit, Export, Near, NeedsMore, Recommended, Settings, Task, as_yaml, merge, settings
from autofit.techniques.adapters import alpha
from autofit.techniques.axes.batching import separates_sequences
from autofit.techniques.axes.kernels import by_liger
from autofit.techniques.habits.known_trainers import LLAMAFACTORY

ATTENTION = {"sdpa": "sdpa", "flash": "fa2", "eager": "disabled"}
"""`flash_attn` of each attention."""


def _method(value: Value, task: Task) -> Settings:
    method: dict[str, object] = {"finetuning_type": "full" if value == "full" else "lora"}
    if value != "full":
        method["lora_dropout"] = task.workload.lora_dropout
    if value != "qlora":
        return settings(method=method)
    quantisation = {"quantization_method": "bnb", "quantization_bit": 4, "quantization_type": "nf4"}
    return settings(method=method, model={**quantisation, "double_quantization": True})


def _rank(value: Value, task: Task) -> Settings:
    return settings(method={"lora_rank": value, "lora_alpha": alpha(int(value))})


def _targets(value: Value, task: Task) -> Settings:
    modules = ta.target_modules(value, task)
    return settings(method={"lora_target": "all" if isinstance(modules, str) else ",".join(modules)})


def _precision(value: Value, task: Task) -> Settings:
    """It loads weights in the checkpoint's own format, and trains copies in fp32 unless `pure_bf16` is set."""
    pure = value == "bf16" and not distributed.by_deepspeed(task)
    notes = []
    if task.config["method"] != "full" and pure and task.workload.trainer is None:
        notes.append(NeedsMore("precision=bf16: LLaMA-Factory trains adapters in fp32; bf16 was measured"))
    return settings(*notes, method={"pure_bf16": pure}, training=ta.precision(task))


def _checkpointing(value: Value, task: Task) -> Settings:
    # Reentrant by default, unlike trials.
    disabled = ta.checkpointing(value) is None
    model: dict[str, object] = {"disable_gradient_checkpointing": disabled, "use_reentrant_gc": False}
    notes = []
    if value == "offload":
        model["use_unsloth_gc"] = True
        notes.append(Near("checkpointing=offload: LLaMA-Factory has code of its own for this, for CUDA devices"))
    return settings(*notes, model=model)


def _batching(value: Value, task: Task) -> Settings:
    return ta.batching(value, *ta.first_label_notes(value, "LLaMA-Factory"))


def _attention(value: Value, task: Task) -> Settings:
    return settings(model={"flash_attn": ATTENTION.get(str(value), "sdpa")})


def _loss(value: Value, task: Task) -> Settings:
    notes = ta.left_out_notes(task, LLAMAFACTORY, "LLaMA-Factory")
    if by_liger(task.config):
        if value != "fused":
            difference = "LLaMA-Factory uses Liger's loss with its kernels: less memory than was measured"
            notes.append(Near(f"loss={value}: {difference}"))
    elif value == "fused" and not notes:
        difference = "LLaMA-Factory then uses Liger's other kernels as well; only the loss was measured"
        notes.append(Near(f"loss=fused: {difference}"))
    elif value == "chunked":
        difference = "LLaMA-Factory has no such loss; all logits exist at once: more memory than was measured"
        notes.append(NeedsMore(f"loss=chunked: {difference}"))
    return merge(settings(*notes), _liger(value, task))


def _liger(value: Value, task: Task) -> Settings:
    """The one switch of all of Liger's kernels, for the axes `kernels` and `loss`."""
    return settings(model={"enable_liger_kernel": task.config.get("loss") == "fused" or by_liger(task.config)})


def _sharding(value: Value, task: Task) -> Settings:
    written = ta.sharding(value, task, trainer="LLaMA-Factory", fsdp=_fsdp)
    if not distributed.by_fsdp(task):
        return written
    note = (
        f"sharding={value}: every process loads the whole model first, unless it is started with accelerate launch "
        "and the file that --format accelerate writes"
    )
    return merge(written, settings(Near(note)))


def _fsdp(task: Task) -> dict[str, object]:
    """In the transformers that LLaMA-Factory requires (at most 5.6), `fsdp` says what is offloaded and wrapped."""
    offloaded = "offload " if task.config["offload"] == "params" else ""
    return {
        "fsdp": f"full_shard {offloaded}auto_wrap",
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": distributed.reshards(task),
            "transformer_layer_cls_to_wrap": distributed.sharded_layers(task),
        },
        **ta.SYNCHRONISED,
    }


TABLE: Mapping[str, Emit] = {
    "method": _method,
    "rank": _rank,
    "targets": _targets,
    "precision": _precision,
    "micro_batch": ta.batch,
    "batching": _batching,
    "checkpointing": _checkpointing,
    "optimizer": ta.optimizer,
    "update": ta.unsettable,
    "attention": _attention,
    "kernels": _liger,
    "mlp": ta.unsettable,
    "loss": _loss,
    "compile": ta.compilation,
    "offload": ta.offload,
    "sharding": _sharding,
}

_TITLES = {
    "model": "Model",
    "method": "Method",
    "data": "Data: add dataset and template. Packing is as was measured",
    "training": "Training",
}


def export_llamafactory(task: Recommended) -> Export:
    """Every value is stated: checkpointing is on by default, and reentrant."""
    base = settings(
        *ta.general_notes(
            task, "LLaMA-Factory", machines="NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT in the environment"
        ),
        model={"model_name_or_path": task.source},
        method={"stage": "sft", "do_train": True},
        # It fills packed sequences up to one token more than this.
        data={
            "cutoff_len": task.workload.seq_len - task.packs,
            "packing": task.packs,
            "neat_packing": separates_sequences(task.config),
        },
        training={"learning_rate": ta.CHOOSE, **ta.run(task)},
    )
    merged = ta.translated(task, base, TABLE, trainer="llamafactory")
    needs = [f"llamafactory >= {LLAMAFACTORY.release}", *(["deepspeed"] if distributed.by_deepspeed(task) else [])]
    needs += ["transformers >= 5.2"] if task.config.get("batching") == "grouped" else []
    needs += ta.libraries(task.config)
    return as_yaml(task, merged, titles=_TITLES, needs=needs, launch=_launch(task))


def _launch(task: Recommended) -> str:
    """For one device the others are hidden, as LLaMA-Factory uses every device it sees."""
    devices = task.workload.devices
    train = "llamafactory-cli train THIS_FILE learning_rate=YOURS dataset=YOURS template=YOURS"
    if devices > 1 or distributed.by_deepspeed(task):
        # It then asks for expandable segments by itself.
        return f"{distributed.threads(task)}FORCE_TORCHRUN=1 NPROC_PER_NODE={devices} {train}"
    chosen = distributed.FIRST_GPU if task.hardware.kind == "cuda" else ""
    return f"{chosen}{distributed.environment(task)}{train}"
