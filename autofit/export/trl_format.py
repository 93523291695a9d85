"""YAML for `trl sft --config FILE`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from autofit.core.lattice import Value
from autofit.export import trainer_arguments as ta
from autofit.export.distributed import allocator, by_deepspeed, by_fsdp, threads
from autofit.export.document import Emit, Export, Near, NeedsMore, Recommended, Settings, Task, as_yaml, merge, settings
from autofit.techniques.axes.batching import separates_sequences
from autofit.techniques.selective import keeps_results


def _method(value: Value, task: Task) -> Settings:
    four_bit = value == "qlora"
    model: dict[str, object] = {"use_peft": value != "full", "load_in_8bit": False, "load_in_4bit": four_bit}
    if four_bit:
        model |= {"bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
    if value != "full":
        model |= {"lora_dropout": task.workload.lora_dropout, "lora_task_type": "CAUSAL_LM"}
    return settings(model=model)


def _targets(value: Value, task: Task) -> Settings:
    modules = ta.target_modules(value, task)
    return settings(model={"lora_target_modules": [modules] if isinstance(modules, str) else modules})


def _precision(value: Value, task: Task) -> Settings:
    method = task.config["method"]
    notes: list[str] = []
    if task.workload.trainer is None and not by_deepspeed(task):  # which casts all weights itself
        if method == "lora" and value == "bf16":
            difference = "trl trains the adapters of a 16-bit base in fp32; bf16 was measured"
            notes.append(NeedsMore(f"precision=bf16: {difference}"))
        if method == "qlora" and value != "bf16":
            difference = f"precision={value}: trl trains the adapters of a 4-bit base in bf16"
            failure = f"{difference}, for which torch refuses loss scaling: it ends at the first step"
            notes.append(failure if value == "fp16-mixed" else Near(f"{difference}; fp32 was measured"))
    return settings(*notes, model={"dtype": ta.load_dtype(task)}, training=ta.precision(task))


def _checkpointing(value: Value, task: Task) -> Settings:
    kwargs = ta.checkpointing(value)
    training: dict[str, object] = {"gradient_checkpointing": kwargs is not None, "activation_offloading": False}
    if kwargs is None:
        return settings(training=training)
    if keeps_results(task.config):
        kwargs["selective"] = True
    return settings(training={**training, "gradient_checkpointing_kwargs": kwargs})


def _batching(value: Value, task: Task) -> Settings:
    notes: list[str] = []
    if value == "packed":
        cuts = Near("batching=packed: trl cuts sequences where a row ends; whole ones were counted")
        notes.append(ta.packing_note("trl") if task.config["attention"] == "flash" else cuts)
    if value == "padding-free" and task.config["attention"] != "flash" and task.config["micro_batch"] == 1:
        notes.append(Near("batching=padding-free: trl warns that it is meant for flash attention"))
    return ta.batching(value, *notes)


def _attention(value: Value, task: Task) -> Settings:
    # The default, `bfd`, flattens a micro-batch into one row, which needs a dense mask except in flash attention.
    flattens = value == "flash" or separates_sequences(task.config)
    packing = {"packing_strategy": "bfd" if flattens else "wrapped"} if task.packs else {}
    return merge(ta.attention(value, task), settings(data=packing))


_liger = partial(ta.liger, without_loss=True)


def _loss(value: Value, task: Task) -> Settings:
    return merge(_liger(value, task), settings(training={"loss_type": "nll"}))


def _sharding(value: Value, task: Task) -> Settings:
    storage = {}
    if by_fsdp(task) and task.config["method"] == "qlora":
        storage["bnb_4bit_quant_storage"] = ta.compute_dtype(task.config)  # FSDP shards floating-point tensors only
    return merge(settings(model=storage), ta.sharding(value, task, trainer="trl"))


TABLE: Mapping[str, Emit] = {
    "method": _method,
    "rank": ta.rank,
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
    "environment": "",
    "model": "Model",
    "data": "Data: add dataset_name or datasets. Packing is as was measured",
    "training": "Training",
}


def export_trl(task: Recommended) -> Export:
    """Every value is stated explicitly: `SFTConfig()` turns checkpointing and bf16 on by default."""
    workload = task.workload
    environment = allocator(task)
    base = settings(
        *ta.general_notes(task, "trl", machines="--num_machines, --machine_rank and --main_process_ip"),
        environment={"env": environment} if environment else {},
        model={"model_name_or_path": task.source},
        data={"max_length": workload.seq_len, "packing": task.packs},
        training={"learning_rate": ta.CHOOSE, **ta.run(task)},
    )
    merged = ta.translated(task, base, TABLE, trainer="trl")
    processes = f"--num_processes {workload.devices}{' --use_deepspeed' if by_deepspeed(task) else ''}"
    return as_yaml(
        task,
        merged,
        titles=_TITLES,
        needs=["trl >= 1.16", "transformers >= 5.17"],
        launch=f"{threads(task)}trl sft --config THIS_FILE --learning_rate YOURS {processes}",
    )
