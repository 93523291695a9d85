"""JSON for `deepspeed.initialize(config=FILE)`, and for whatever else reads such a file: Trainer, accelerate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from autofit.core.lattice import Value
from autofit.export import distributed
from autofit.export.document import Emit, Export, Recommended, Settings, Task, collect, merge, settings
from autofit.techniques.axes.optimizer import OPTIMIZERS

FILLED = ("lr",)
"""Optimizer arguments that are left to the user; the others are those of trials."""

_WITHOUT_ZERO = {
    "none": "torch alone was measured; ZeRO is off here",
    "ddp": "torch's DDP was measured; ZeRO is off here, and DeepSpeed sums the gradients",
    "fsdp": "DeepSpeed has no FSDP: ZeRO is off here, and nothing is sharded",
}


def _optimizer(value: Value, task: Task) -> Settings:
    kind, keys = OPTIMIZERS[str(value)], dict[str, object]()
    if not distributed.on_host(task):
        if kind.deepspeed is None:
            note = f"optimizer={value}: DeepSpeed has no name for it: pass the optimizer to deepspeed.initialize"
            return settings(note)
        name, arguments = kind.deepspeed
        parameters = {"lr": "auto", "weight_decay": kind.weight_decay, **arguments}
        keys = {"optimizer": {"type": name, "params": parameters}}
    return settings(
        "learning rate: yours to choose: Trainer and accelerate fill in 'auto', deepspeed.initialize needs a number",
        f"weight decay: {kind.weight_decay} was measured; Trainer and accelerate must be given the same",
        zero=keys,
    )


def _sharding(value: Value, task: Task) -> Settings:
    """Everything in the file except the optimizer."""
    if distributed.by_deepspeed(task):
        notes = distributed.nvme_notes(task)
        if threads := distributed.threads(task).strip():
            notes.append(f"threads: updates are made on the host: start with {threads}; launchers give one thread")
        return settings(*notes, zero=distributed.deepspeed_config(task, filled=FILLED))
    notes = [f"sharding={value}: {_WITHOUT_ZERO[str(value).removesuffix('-no-reshard')]}"]
    if task.config["offload"] != "none":
        notes.append(f"offload={task.config['offload']}: nothing is offloaded here")
    if task.config["precision"] == "bf16":
        notes.append("precision=bf16: without ZeRO DeepSpeed adds fp32 copies of the weights, which it updates")
    return settings(*notes, zero=_without_zero(task))


def _without_zero(task: Task) -> dict[str, object]:
    """The config's batch, clipping and precision, without ZeRO."""
    config = task.config.replace(sharding="zero1", offload="none")
    deepspeed = distributed.deepspeed_config(replace(task, config=config), filled=FILLED)
    deepspeed["zero_optimization"] = {"stage": 0}
    if "bf16" in deepspeed:
        deepspeed["bf16"] = {"enabled": True}
    return deepspeed


def _precision(value: Value, task: Task) -> Settings:
    """A note on what DeepSpeed has no line for; `_sharding` writes the rest."""
    switch = 'torch.set_float32_matmul_precision("high")'
    return settings(*([f"precision=tf32: the training script must call {switch}"] if value == "tf32" else []))


TABLE: Mapping[str, Emit] = {
    "precision": _precision,
    **dict.fromkeys(("micro_batch", "offload"), lambda value, task: settings()),
    "sharding": _sharding,  # which writes these two as well
    "optimizer": _optimizer,
}
"""The other axes are up to the training script."""


def export_deepspeed(task: Recommended) -> Export:
    """DeepSpeed's JSON has no room for comments: what it cannot express is in the notes alone."""
    workload = task.workload
    ranks = (
        f"ranks: start {workload.devices}; with another number a step does not have {workload.global_batch} sequences"
    )
    merged = merge(settings(ranks), collect(TABLE, task, starts_a_script=True))
    text = json.dumps(merged.sections.get("zero", {}), indent=2) + "\n"
    return Export(text=text, notes=merged.notes)
